"""The environment variables of this package, in one place: what an engine and `nixl-actor` look up, and what an engine
warns of because it is none of them."""

TRACE_DIRECTORY_VARIABLE = "NIXL_ACTOR_TRACE_DIR"
"""Sets the option `trace_directory` where the configuration does not."""

ENGINES_VARIABLE = "NIXL_ACTOR_ENGINES"
"""Of `nixl-actor`: the side channels that it asks."""

CURVE_DIRECTORY_VARIABLE = "NIXL_ACTOR_CURVE_DIRECTORY"
"""Of `nixl-actor`: its keys."""

PREFIX = "NIXL_ACTOR_"
VARIABLES = (TRACE_DIRECTORY_VARIABLE, ENGINES_VARIABLE, CURVE_DIRECTORY_VARIABLE)
