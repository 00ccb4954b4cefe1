"""An actor-model KV-transfer connector for vLLM's disaggregated prefill/decode.

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "connector", ...}'

The class is looked up lazily, so that importing the package loads neither vLLM nor torch, NIXL or ZMQ. What is
looked at first is whether the package `statemachine` is this project's: another distribution installs one of that name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.nixl_connector import NixlActorConnector, NixlConnector, NixlPullConnector

__all__ = ["NixlActorConnector", "NixlConnector", "NixlPullConnector"]

_OF_OFFLOADING_SIZE = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")
"""What vLLM makes of `kv_connector` for `--kv-offloading-size`. It leaves `kv_connector_module_path` as it is."""

DISTRIBUTION = "nixl-actor-connector"


def _require_own_statemachine() -> None:
    """Raise ImportError, which says what to do, where `import statemachine` finds something else."""
    cause: BaseException | None = None
    try:
        import statemachine

        if getattr(statemachine, "DISTRIBUTION", None) == DISTRIBUTION:
            return
    except Exception as error:  # whatever a foreign package, half of which was overwritten, may raise
        cause = error
    found = getattr(sys.modules.get("statemachine"), "__file__", None) or "nothing that can be imported"
    raise ImportError(
        f"the package `statemachine` is not that of {DISTRIBUTION} but {found}. python-statemachine installs one of "
        "the same name, and the two cannot share an environment: uninstall python-statemachine, then "
        f"pip install --force-reinstall --no-deps {DISTRIBUTION}",
        name="statemachine",
    ) from cause


_require_own_statemachine()


def __getattr__(name: str) -> Any:
    if name in _OF_OFFLOADING_SIZE:
        # Not an AttributeError, in whose place vLLM would raise one that names no option.
        from connector.unsupported import UnsupportedCache

        found = f"{name}, which vLLM's --kv-offloading-size and --kv-offloading-backend put in the place of this one"
        expected = (
            "kv_connector NixlConnector; leave these options out, and to have both write kv_connector MultiConnector "
            "with a list of the two (docs/using.md)"
        )
        raise UnsupportedCache("kv_connector", found, expected)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connector import nixl_connector

    return getattr(nixl_connector, name)
