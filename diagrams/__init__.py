"""Pictures of the machines, and the script that draws them (`draw`). Nothing in production imports this."""
