"""What `vllm serve` makes of a command line, by vLLM's own parser."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from vllm.config import KVTransferConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.on_vllm.moved import make_arg_parser


@functools.cache
def _parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def serve_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments behind `vllm serve`. AssertionError where vLLM would refuse one."""
    try:
        found: argparse.Namespace = _parser().parse_args(list(arguments))
    except SystemExit:
        raise AssertionError(f"vllm serve does not take {list(arguments)}") from None
    return found


def transfer_config(arguments: Sequence[str]) -> KVTransferConfig:
    """`--kv-transfer-config` among them."""
    found = serve_arguments(arguments).kv_transfer_config
    assert isinstance(found, KVTransferConfig)
    return found
