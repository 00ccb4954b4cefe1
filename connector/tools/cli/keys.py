"""Commands that make keys for engines: `nixl-actor keys curve`, `nixl-actor keys params`.

Nothing is sent anywhere. How keys are distributed and replaced while engines run is in
docs/operations/security.md.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from connector.wire.signatures import ParamsKey, ParamsKeys

app = typer.Typer(help="Make keys for engines (docs/operations/security.md).", no_args_is_help=True)
params_app = typer.Typer(help="The file of the option params_keys_file.", no_args_is_help=True)
app.add_typer(params_app, name="params")

NAME_PATTERN = r"[A-Za-z0-9_.-]{1,64}"

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of the option params_keys_file.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of a key in it.")]


@app.command()
def curve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="For the option curve_directory.")],
    name: Annotated[
        str | None, typer.Option(help="Whose keys they are, for people; otherwise the name of the directory.")
    ] = None,
) -> None:
    """Make a pair of keys for the side channel and the control sockets. One that is there is never overwritten."""
    from connector.ports.curve_keys import make_pair

    name = directory.resolve().name if name is None else name
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise typer.BadParameter(f"{name!r} is not 1 to 64 letters, digits, dots, underscores or hyphens")
    try:
        own, public = make_pair(directory, name)
    except FileExistsError as error:
        raise typer.BadParameter(
            f"{error.filename} is already there, and nothing is overwritten. To roll the pair, make the new one in "
            "another directory under another name (--name), and follow docs/operations/security.md, Keys for sockets"
        ) from None
    except OSError as error:
        raise typer.BadParameter(f"{directory}: {error}") from None
    typer.echo(f"{own}: the secret of {name}, for nobody else")
    typer.echo(f"{public}: its public key; copy it to accepted/ of everybody who is to deal with {name}")


@params_app.command()
def add(
    file: KeyFile,
    key_id: Annotated[
        str | None,
        typer.Option("--id", help="Of the new key; otherwise the date, and what tells it from others of it."),
    ] = None,
) -> None:
    """Make a key, and the file if there is none. Behind others it is accepted, and does not sign."""
    from connector.wire.signatures import SECRET_BYTES_MIN, ParamsKey, ParamsKeys

    before = _read(file, may_be_absent=True)
    if key_id is None:
        # Not the date alone: another file may get a key today, and two keys with one id are hard to tell apart.
        key_id = f"{time.strftime('%Y-%m-%d', time.gmtime())}.{secrets.token_hex(4)}"
    _write(file, ParamsKeys((*before, ParamsKey(key_id, secrets.token_bytes(SECRET_BYTES_MIN)))))


@params_app.command()
def use(file: KeyFile, key_id: KeyId) -> None:
    """Sign with this key from now on."""
    from connector.wire.signatures import ParamsKeys

    keys = _read(file)
    chosen = [key for key in keys if key.key_id == key_id]
    if not chosen:
        raise typer.BadParameter(f"{file} has no key {key_id!r}")
    _write(file, ParamsKeys((*chosen, *(key for key in keys if key.key_id != key_id))))


@params_app.command()
def drop(file: KeyFile, key_id: KeyId) -> None:
    """Accept this key no longer. The one that signs cannot be dropped."""
    from connector.wire.signatures import ParamsKeys

    keys = _read(file)
    if key_id == keys[0].key_id:
        raise typer.BadParameter(f"key {key_id!r} signs; use another one first")
    kept = tuple(key for key in keys if key.key_id != key_id)
    if len(kept) == len(keys):
        raise typer.BadParameter(f"{file} has no key {key_id!r}")
    _write(file, ParamsKeys(kept))


def _read(file: Path, *, may_be_absent: bool = False) -> tuple[ParamsKey, ...]:
    from connector.wire.signatures import parse_keys

    try:
        return parse_keys(file.read_text(encoding="utf-8")).keys
    except FileNotFoundError as error:
        if may_be_absent:
            return ()
        raise typer.BadParameter(f"{file}: {error}") from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file}: {error}") from None


def _write(file: Path, keys: ParamsKeys) -> None:
    """Replace the file as a whole, because an engine may be reading it. If the path is a link, replace its target."""
    from connector.wire.signatures import parse_keys

    try:
        written_to = file.resolve()
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        text = _with_comments_of(before, keys)
        parse_keys(text)
        new = written_to.with_name(f".{written_to.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
            written.write(text)
        os.replace(new, written_to)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link that leads to itself
        raise typer.BadParameter(f"{file}: {error}") from None
    signs, *others = (key.key_id for key in keys.keys)
    typer.echo(f"{file}: {signs} signs" + (f"; accepted too: {', '.join(others)}" if others else ""))


def _with_comments_of(before: str, keys: ParamsKeys) -> str:
    """The text of these keys with the comments of the text before. Those right above a key go with it, also when it is
    dropped; what an empty line, or the head that every file has, parts from the first key stays above all."""
    from connector.wire.signatures import format_keys

    head_line, *key_lines = format_keys(keys).splitlines()
    head: list[str] = []
    above: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in before.splitlines():
        key_id, *_ = line.split(maxsplit=1) or [""]
        if key_id and not key_id.startswith("#"):
            above[key_id], waiting = waiting, []
            continue
        waiting.append(line)
        if not above and (not key_id or line == head_line):
            head, waiting = head + waiting, []
    lines = head if head_line in head else [head_line, *head]
    for key, line in zip(keys.keys, key_lines, strict=True):
        lines += [*above.get(key.key_id, ()), line]
    return "\n".join([*lines, *waiting]) + "\n"
