"""The verb ``patches``: patches between files of safetensors, and a web server for the store of a chain."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from gckernels import patches
from gckernels.patches.chain.server import server_of
from gckernels.patches.format.safetensors_files import TensorFile, read_tensors

from .common.console import Console
from .common.files import add_outputs
from .common.outcome import CommandError, Outcome, Part, bad_data, wrong_use

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HELP = "gckernels patches --help lists what can be done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels patches``."""
    parser.description = (
        "Write what changed between two files of safetensors, without loss, in about a byte per changed element; apply "
        "such a patch; or serve the folder of a chain of versions to followers."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    diff = actions.add_parser("diff", help="write the patch from OLD to NEW")
    apply = actions.add_parser("apply", help="write what OLD becomes by PATCH; the file has the header of OLD")
    show = actions.add_parser("show", help="say how much has changed from OLD to NEW, and how long a patch is")
    serve = actions.add_parser("serve", help="serve FOLDER, which a publisher writes, until interrupted")
    apply.add_argument("patch", metavar="PATCH", help="a file that diff has written")
    for each in (diff, apply, show):
        each.add_argument("old", metavar="OLD", help="a file of safetensors")
        each.add_argument("--key-file", metavar="FILE", help="a file with the key of an HMAC, in place of a SHA-256")
    for each in (diff, show):
        each.add_argument("new", metavar="NEW", help="a file with tensors of the same names, shapes and types")
    add_outputs(diff, "the patch")
    add_outputs(apply, "the tensors")
    add_outputs(show)
    serve.add_argument("folder", metavar="FOLDER", help="the folder of patches.Folder")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8470, help="the port (default: 8470)")
    serve.add_argument("--token-file", metavar="FILE", help="a file with the token that requests must have")
    serve.add_argument("--certificate", metavar="FILE", help="the server's certificates; with them it speaks TLS")
    serve.add_argument("--certificate-key", metavar="FILE", help="their private key, if it is not in that file")
    serve.add_argument("--write", action="store_true", help="let a publisher write over the network, too")


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Do what is asked for."""
    if given.action == "serve":
        return _serve(given, console)
    key = None if given.key_file is None else _word_in(given.key_file)
    old = _read(given.old)
    if given.action == "apply":
        return _apply(given, old, key)
    new = _read(given.new)
    with _refusing(f"{given.old}, {given.new}"):
        data = patches.diff(old.tensors, new.tensors, key=key)
    record = _figures(old, new, len(data))
    if given.action == "show":
        return Outcome([Part(_text_of(record), record)])
    if given.output is None:
        raise wrong_use("diff writes a patch", "name it with -o FILE")
    return Outcome([Part(_text_of(record), record)], {given.output: data})


def _apply(given: argparse.Namespace, old: TensorFile, key: bytes | None) -> Outcome:
    if given.output is None:
        raise wrong_use("apply writes a file", "name it with -o FILE")
    with _refusing(given.patch):
        try:
            data = Path(given.patch).read_bytes()
        except OSError as error:
            raise wrong_use(f"{given.patch}: {error.strerror}", _HELP) from None
        patches.apply(data, old.tensors, key=key)
    record = {"digest": f"{patches.digest(old.tensors):016x}", "tensors": len(old.tensors)}
    return Outcome([Part(f"digest {record['digest']}", record)], {given.output: old.content()})


def _serve(given: argparse.Namespace, console: Console) -> Outcome:
    if not Path(given.folder).is_dir():
        raise wrong_use(f"{given.folder}: there is no such folder", _HELP)
    token = None if given.token_file is None else _word_in(given.token_file).decode(errors="replace")
    if token is None and given.host not in _LOOPBACK:
        raise wrong_use(f"--host {given.host}: other machines could read the weights", "name a file with --token-file")
    settings = {"certificate": given.certificate, "certificate_key": given.certificate_key}
    folder = patches.Folder(given.folder)
    try:
        server = server_of(folder, given.host, given.port, token=token, writable=given.write, **settings)
    except OSError as error:
        raise wrong_use(f"{given.host}:{given.port}: cannot be served: {error}", _HELP) from None
    scheme = "http" if given.certificate is None else "https"
    console.note(f"{given.folder} is at {scheme}://{given.host}:{server.server_address[1]}")
    with server:
        server.serve_forever()
    return Outcome()


def _read(path: str) -> TensorFile:
    with _refusing(path):
        try:
            return read_tensors(path)
        except OSError as error:
            raise wrong_use(f"{path}: {error.strerror}", _HELP) from None


def _word_in(path: str) -> bytes:
    """The content of a file, without white space around it."""
    try:
        word = Path(path).read_bytes().strip()
    except OSError as error:
        raise wrong_use(f"{path}: {error.strerror}", _HELP) from None
    if not word:
        raise wrong_use(f"{path}: is empty", "put a long random word into it")
    return word


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Errors about data name the file."""
    try:
        yield
    except CommandError:
        raise
    except (ValueError, TypeError, patches.PatchError) as error:
        raise bad_data(f"{name}: {error}", _HELP) from None


def _figures(old: TensorFile, new: TensorFile, nbytes: int) -> dict[str, int]:
    """The sizes of a patch and of the tensors, as JSON values."""
    pairs = [(tensor, new.tensors[name]) for name, tensor in old.tensors.items()]
    changed = sum(int(_rows(one).ne(_rows(other)).any(1).sum()) for one, other in pairs if one.numel())
    dense = sum(one.numel() * one.element_size() for one, _ in pairs)
    record = {"elements": sum(one.numel() for one, _ in pairs), "changed": changed, "dense_nbytes": dense}
    return record | {"patch_nbytes": nbytes}


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), -1)


def _text_of(record: dict[str, int]) -> str:
    changed, nbytes, dense = (record[name] for name in ("changed", "patch_nbytes", "dense_nbytes"))
    bits = f"{8 * nbytes / changed:.1f} bits for each, " if changed else ""
    share = changed / max(record["elements"], 1)
    size = f"{nbytes:,} bytes: {bits}1/{dense / nbytes:.1f} of {dense:,} bytes"
    return f"{changed:,} of {record['elements']:,} elements changed ({share:.2%}); {size}"
