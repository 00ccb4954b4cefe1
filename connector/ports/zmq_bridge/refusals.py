"""Why a connection to a listener cannot be had, or has ended: sentences about the other end. `here` is an engine or a
tool."""

REFUSED = "the connection was refused, or there is no way to the host"
ENDED = "the connection was ended before anything was said"
UNANSWERED = "it has ended the connection instead of answering: it has just ended, or has more connections than it may"
ENDLESS = "it sends a message without end"
NOT_LET_IN = (
    "it does not let us in: our address is not in its allowed_peers, or our public key not among its accepted keys"
)
NO_KEY_HERE = "it speaks to those only who have a key, and there is none here (curve_directory)"
NO_KEY_THERE = "it has no key, and we speak to those only who have one (allow_insecure_peers)"
OTHER_KEY = "it has a key that is not among the {count} keys that are accepted here"
