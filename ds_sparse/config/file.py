"""From a file, a dict or base64 text to DeepSpeed's configuration and the block, not yet validated."""

from __future__ import annotations

import base64
import difflib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import hjson

from ..sparsity import sparsity_modes
from ..sparsity._fields import json_fields
from ..sparsity._registry import loaded_classes
from ..tools.wording import BLOCK_KEY, printable, reason, show, show_key

Source = str | os.PathLike[str] | Mapping[str, Any]

LAYERS_KEY = "layers"
"""The key of a block that gives layers a structure of their own."""

_ALSO_OF_OTHERS = ("seed", "causal", "strict_causal", "attention")
"""Keys of a block that a program may have for itself at the top level of its JSON."""


class SparseAttentionConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence each in `mistakes`.

    Args:
        mistakes: the sentences. The error's text has one a line.

    Examples:
        >>> import ds_sparse
        >>> try:
        ...     ds_sparse.parse_sparse_attention({"mode": "fixed", "num_local_blocks": 0, "blok": 16}, num_heads=2)
        ... except ds_sparse.SparseAttentionConfigError as error:
        ...     for sentence in error.mistakes:
        ...         print(sentence)
        the config: sparse_attention.blok: unknown key (given 16). Did you mean "block"?
        the config: sparse_attention.num_local_blocks: got 0; wanted an integer of at least 1.
    """

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class LoadedConfig(NamedTuple):
    deepspeed: dict[str, Any]
    """The configuration without the block: what DeepSpeed gets."""
    block: dict[str, Any] | None
    """The `sparse_attention` block, not yet validated; None when there is none."""


def load_config(config: Source) -> LoadedConfig:
    """Reads a configuration as DeepSpeed does, and takes the `sparse_attention` block out.

    Args:
        config: a path to an hjson file, a dict, which stays as it is, or such a file's text in base64.

    Returns:
        `deepspeed`, the configuration without the block, and `block`, not yet validated, or None where there is none;
        a named tuple of both.

    Raises:
        SparseAttentionConfigError: the file cannot be read or parsed, has a key twice, the block is no object, or it
            has another name or place than `sparse_attention` at the top level.
        TypeError: none of the three.

    Examples:
        >>> import ds_sparse
        >>> deepspeed, block = ds_sparse.load_config({"train_batch_size": 8, "sparse_attention": {"mode": "fixed"}})
        >>> deepspeed, block
        ({'train_batch_size': 8}, {'mode': 'fixed'})
    """
    if not isinstance(config, str | os.PathLike | Mapping):
        raise TypeError(f"A DeepSpeed config is a path, a dict or a base64 string, got {type(config).__name__}.")
    source = name_of(config)
    if isinstance(config, Mapping):
        return _without_block(dict(config), source)
    return parse_config(_read(config), source)


def parse_config(raw: bytes, source: str) -> LoadedConfig:
    """`load_config` of a file's content; `source` names it in every message.

    Raises:
        SparseAttentionConfigError: as `load_config`.
    """
    return _without_block(_parse(raw, source), source)


def name_of(source: Source) -> str:
    """Names a configuration in a message."""
    if isinstance(source, Mapping):
        return "the config dict"
    name = os.fspath(source)
    return printable(name) if os.path.exists(name) or _from_base64(name) is None else "the base64 config"


def check_is_object(block: Any, source: str) -> None:
    if not isinstance(block, Mapping):
        raise SparseAttentionConfigError(
            [f"{source}: {BLOCK_KEY}: got {show(block)}; wanted an object {{...}}. For dense training remove the key."]
        )


def _from_base64(text: str) -> bytes | None:
    try:
        decoded = base64.urlsafe_b64decode(text)
    except ValueError:
        return None
    # Nearly any word decodes to something; a configuration is an object.
    return decoded if decoded.lstrip().startswith(b"{") else None


def _read(config: str | os.PathLike[str]) -> bytes:
    path = os.fspath(config)
    if not os.path.exists(path):
        decoded = _from_base64(path)
        if decoded is None:
            raise SparseAttentionConfigError([f"{path}: no such file, and not a DeepSpeed config in base64 either."])
        return decoded
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SparseAttentionConfigError([f"{path}: cannot be read: {error.strerror}."]) from error


def _parse(raw: bytes, source: str) -> dict[str, Any]:
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SparseAttentionConfigError(
            [f"{source}: not UTF-8 text (byte {error.start}): save it as UTF-8."]
        ) from error
    try:
        content = hjson.loads(text, object_pairs_hook=collect)
    except (ValueError, OverflowError, IndexError) as error:
        raise SparseAttentionConfigError([f"{source}: not valid JSON: {_why_not_json(text, error)}."]) from error
    except RecursionError as error:
        raise SparseAttentionConfigError([f"{source}: not a DeepSpeed config: nested too deeply to read."]) from error
    if twice:
        raise SparseAttentionConfigError(
            [f"{source}: {show_key(key)}: given twice in one object; keep one." for key in twice]
        )
    if not isinstance(content, dict):
        raise SparseAttentionConfigError([f"{source}: a DeepSpeed config is an object {{...}}, got {show(content)}."])
    if not content and "{" not in text:
        raise SparseAttentionConfigError(
            [f'{source}: holds nothing; a DeepSpeed config is an object such as {{"train_batch_size": 8}}.']
        )
    return content


def _why_not_json(text: str, error: Exception) -> str:
    """Quotes Python's reader of strict JSON, which is nearer to the mistake: hjson takes a word that it does not
    know for text up to the end of its line, and then misses what stands there. hjson's own where the file has
    comments or texts of several lines."""
    if isinstance(error, OverflowError):
        return "a number beyond all bounds"
    if isinstance(error, IndexError):  # where hjson reads beyond the end
        only_line = "" if "\n" in text else ", or such a text stands on the file's only line"
        return f"a comment that begins with /* or a text that begins with ''' is not closed{only_line}"
    if "'''" in text or any(line.lstrip().startswith(("#", "//", "/*")) for line in text.splitlines()):
        return reason(error)
    constants: list[str] = []
    try:
        json.loads(text, parse_constant=constants.append)
    except (ValueError, RecursionError) as stricter:
        return reason(stricter) if isinstance(stricter, ValueError) else reason(error)
    return f"JSON has no {constants[0]}; write a number" if constants else reason(error)


def _without_block(content: dict[str, Any], source: str) -> LoadedConfig:
    if BLOCK_KEY not in content:
        _check_is_not_elsewhere(content, source)
        return LoadedConfig(content, None)
    block = content.pop(BLOCK_KEY)
    check_is_object(block, source)
    return LoadedConfig(content, dict(block))


def _check_is_not_elsewhere(content: Mapping[str, Any], source: str) -> None:
    """Raises SparseAttentionConfigError where a file without the block was meant to have it."""
    for key in difflib.get_close_matches(BLOCK_KEY, [key for key in content if isinstance(key, str)], cutoff=0.8):
        raise SparseAttentionConfigError([f'{source}: {show_key(key)}: unknown key. Did you mean "{BLOCK_KEY}"?'])
    for path in _paths_to_block(content):
        raise SparseAttentionConfigError(
            [f"{source}: {path}: the block is nested, where nothing reads it; put it at the top level of the file."]
        )
    own = {key for cls in loaded_classes().values() for key in json_fields(cls)} - set(_ALSO_OF_OTHERS)
    found = [key for key in content if key in own or (key == "mode" and content[key] in sparsity_modes())]
    if found:
        sentence = (
            f"{source}: {', '.join(found)}: of a {BLOCK_KEY} block, but at the top level, where nothing reads it; put "
            f'it into one: "{BLOCK_KEY}": {{{show(found[0])}: {show(content[found[0]])}, ...}}.'
        )
        raise SparseAttentionConfigError([sentence])


def _paths_to_block(content: Mapping[str, Any], above: str = "", deep: int = 8) -> Iterator[str]:
    for key, value in content.items():
        path = f"{above}{show_key(key)}"
        if above and key == BLOCK_KEY:
            yield path
        elif isinstance(value, Mapping) and deep:
            yield from _paths_to_block(value, f"{path}.", deep - 1)
