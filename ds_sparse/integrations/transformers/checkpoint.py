"""Checkpoints of Transformers as folders, and what is made of them: `adapt`, one for longer sequences; `convert`, of a
Longformer, BigBird or LED one of RoBERTa, BERT or BART; `choices_of`, what their layers choose for a text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from ...models.layers import attention_layers
from ...models.position_table import base_model, kind_without_table, position_table, why_no_table
from ...models.report import SparsifyReport
from ...models.sparse_attention_utils import SparseAttentionUtils
from ...models.sparsify import activate, sparsify
from ...modules.choices import Choice, record_choices
from ...modules.chosen_attention import LEARNED
from ...modules.structured_attention import check_tokens
from ...sparsity import SparsityConfig
from ...tools.ranks import say
from ...tools.wording import BLOCK_KEY, reason
from ..transformers_family import NAME
from .binding import number_of
from .converters import CONVERTERS

_MODULES = "modules.json"
"""A file of sentence-transformers: what comes after the model, such as its pooling, and folders of settings."""


def adapt(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_position: int,
    sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
) -> SparsifyReport:
    """Writes a checkpoint for longer sequences, made of a dense one: what `ds_sparse adapt` does.

    The table of positions is extended by repetition, as `SparseAttentionUtils.extend_position_embedding` does; a model
    with rotary or relative positions has none, and its weights stay as they are. The structure is written to
    `config.sparse_attention`, the length to the tokenizer and, where there are such, to the files of
    sentence-transformers. Load the result with `attn_implementation="ds_sparse"`, to use it or to train on. With a
    dense layout, sequences that the original takes give what they gave.

    Args:
        model: the folder of a checkpoint of Transformers, or its name in the hub's cache; nothing is downloaded.
        out: the new checkpoint's folder, which is new or empty.
        max_position: maximum length of the new model, in tokens.
        sparsity_config: the structure, or a dict with the keys of the JSON block; by default what `sparsify` takes.

    Returns:
        What became sparse; `str()` is a table.

    Raises:
        ValueError: no such model, one that cannot be sparse, fewer tokens than there are, an `out` that holds
            something. Then nothing has been written.
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        TypeError: neither a structure nor a dict; a `max_position` that is no integer.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "bslongformer", "block": 64}
        >>> report = ds_sparse.adapt(
        ...     "all-MiniLM-L6-v2", "minilm-4096", max_position=4096, sparsity_config=block
        ... )  # doctest: +SKIP
    """
    check_tokens("max_position", max_position)
    with _new_folder(out) as folder:
        source = _folder_of(model)
        dense, tokenizer = _load(source)
        report = activate(dense, attention_layers(dense), sparsity_config, max_position)
        _make_room(dense, max_position)
        if tokenizer is not None:
            SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, max_position)
        _save(dense, tokenizer, source, folder, max_position)
    return report


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
) -> SparsifyReport:
    """Writes a checkpoint of RoBERTa, BERT or BART, made of one of Longformer, BigBird or LED, as the command does.

    Weights, head and tokenizer are the same; the structure is by default the one nearest to the model's own, at its
    longest sequence. A Longformer's window is rounded up to whole blocks, and the projections of its global tokens are
    left out; so it is in LED's encoder, while its decoder stays dense. A BigBird gets the random blocks that it trains
    with, layer by layer, or a dense layout where its attention_type is "original_full". Load the result with
    `attn_implementation="ds_sparse"`.

    Args:
        model: the folder of a checkpoint of Transformers, or its name in the hub's cache; nothing is downloaded.
        out: the new checkpoint's folder, which is new or empty.
        sparsity_config: another structure, or a dict with the keys of the JSON block.

    Returns:
        What became sparse; `str()` is a table.

    Raises:
        ValueError: no such model, one of another family, with a head that the new family does not have, a BigBird with
            blocks of a size that structures do not have and no `sparsity_config`, an `out` that holds something. Then
            nothing has been written.
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        TypeError: neither a structure nor a dict.

    Examples:
        >>> import ds_sparse
        >>> report = ds_sparse.convert("allenai/longformer-base-4096", "roberta-4096")  # doctest: +SKIP
    """
    with _new_folder(out) as folder:
        source = _folder_of(model)
        original, tokenizer = _load(source)
        converter = CONVERTERS.get(original.config.model_type)
        if converter is None:
            raise ValueError(
                f"{type(original).__name__} is neither a Longformer nor a BigBird nor an LED; sparsify and "
                "ds_sparse adapt take other encoders as they are."
            )
        structure = converter.structure(original) if sparsity_config is None else sparsity_config
        converted = converter.convert(original)
        report = sparsify(converted, structure, max_seq_length=converter.longest(original))
        _save(converted, tokenizer, source, folder)
    return report


def choices_of(
    model: str | os.PathLike[str], text: str, tokens: int, block: Mapping[str, Any] | None = None
) -> dict[int, Choice]:
    """The blocks that the layers of a checkpoint choose for a text, by the layer's number: what `ds_sparse draw` draws.

    Args:
        model: the folder of a checkpoint of Transformers, or its name in the hub's cache; nothing is downloaded.
        tokens: of the text no more than these, from its beginning.
        block: keys of the JSON block, in the place of those that the checkpoint's config has.

    Raises:
        ValueError: no such model, one without a tokenizer or whose layers choose nothing; a text without a token.
    """
    folder = _folder_of(model)
    config = _config(folder)
    if block is not None:
        setattr(config, BLOCK_KEY, dict(block))
    if getattr(config, BLOCK_KEY, None) is None:
        raise ValueError(f"{folder}: its config has no {BLOCK_KEY}; give a file with mode moba, nsa or indexer.")
    loaded, tokenizer = _load(folder, config=config, attn_implementation=NAME)
    if tokenizer is None:
        raise ValueError(f"{folder}: it has no tokenizer, which makes tokens of a text; add that of the model to it.")
    limit = min(tokens, tokenizer.model_max_length)
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)["input_ids"].long()
    if ids.numel() == 0:
        raise ValueError("The text has no token; give a longer one.")
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    loaded.to(device)
    with torch.no_grad(), record_choices(loaded) as choices:
        loaded(ids.to(device))
    if not choices:
        raise ValueError(
            f"{folder}: none of its layers chooses blocks. Give a file with mode moba, nsa or indexer; of a layout "
            "leave the model out."
        )
    layers = {name: loaded.get_submodule(name.removesuffix(f".{LEARNED}")) for name in choices}
    return {number_of(layers[name]): choice for name, choice in choices.items()}


def _make_room(model: PreTrainedModel, max_position: int) -> None:
    """Extends the positions of a model, in whatever way it has them, and says how.

    Raises:
        ValueError: fewer tokens than there are; a model whose positions are not known.
    """
    if position_table(base_model(model)) is not None:
        SparseAttentionUtils.extend_position_embedding(model, max_position)
        return
    known = kind_without_table(model)
    if known is None:
        raise ValueError(why_no_table(model, max_position))
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_position < positions:
        raise ValueError(f"max_position is {max_position}, and there are {positions} positions; ask for more.")
    if positions is not None and not _scales_by_length(config):
        config.max_position_embeddings = max_position
    trained = "" if positions is None else f"; it was made for {positions} tokens"
    say(f"{type(model).__name__} has {known[0]} positions and no table, so its weights stay as they are{trained}.")


def _scales_by_length(config: Any) -> bool:
    """Tells whether rotary angles depend on `max_position_embeddings`, as all but the plain ones may."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = given.values() if all(isinstance(entry, dict) for entry in given.values()) else [given]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)


def _folder_of(model: str | os.PathLike[str]) -> Path:
    """Where the files of a checkpoint are: the folder itself, or that of a name in the hub's cache.

    Raises:
        ValueError: neither, or a folder without a config.json.
    """
    name = os.fspath(model)
    folder = Path(name)
    if not folder.exists():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError) as error:  # no name of the hub, or one that is not in the cache
            raise ValueError(
                f"{name}: no such folder, and no model of this name in the hub's cache; give the folder of a "
                f"checkpoint, or download it first: hf download {name}"
            ) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: no checkpoint of Transformers: it has no config.json.")
    return folder


def _load(folder: Path, **options: Any) -> tuple[PreTrainedModel, Any]:
    """The model, by the class that its config names, and the tokenizer, None where there is none. What the weights lack
    or have besides is said."""
    cls = _class_of(folder)
    tokenizer = _tokenizer(folder)
    with _or_says(f"{folder}: its weights cannot be loaded", Exception):  # each format of weights has errors of its own
        model, found = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    if found["missing_keys"]:
        say(f"not in the checkpoint, and initialized anew: {', '.join(sorted(found['missing_keys']))}.")
    if found["unexpected_keys"]:
        say(f"in the checkpoint, and left out: {', '.join(sorted(found['unexpected_keys']))}.")
    return model.eval(), tokenizer


@contextmanager
def _new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write to, which is new or empty; after an error it is as it was.

    Raises:
        ValueError: there is something, or no folder can be made there.
    """
    folder = Path(out)
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        if not made and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder}: there is something already, and nothing is overwritten; give a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: no folder can be made there: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: no file can be made there: permission denied.")
    try:
        yield folder
    except BaseException:
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for place in made:
            place.rmdir()
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and reports of Transformers; what matters of them is said by `_load`."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _tokenizer(folder: Path) -> Any:
    with _or_says(f"{folder}: its tokenizer cannot be loaded", OSError, ValueError, KeyError, ImportError):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Transformers makes a tokenizer that knows no word where there is none.
    vocabulary = set(tokenizer.vocab_files_names.values())
    if vocabulary and not any((folder / name).is_file() for name in vocabulary | {"tokenizer.json"}):
        return None
    return tokenizer


def _config(folder: Path) -> Any:
    with _or_says(f"{folder}: its config.json cannot be read", OSError, ValueError, KeyError):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _class_of(folder: Path) -> Any:
    names = getattr(_config(folder), "architectures", None)
    if not names:
        return AutoModel
    if not hasattr(transformers, names[0]):
        raise ValueError(
            f"{folder}: its config.json names the class {names[0]}, which transformers {transformers.__version__} does "
            "not have; code that comes with a checkpoint is not run."
        )
    return getattr(transformers, names[0])


def _save(model: PreTrainedModel, tokenizer: Any, source: Path, target: Path, max_position: int | None = None) -> None:
    """Writes a checkpoint to an empty folder, with the files of sentence-transformers in the folder that it was made
    of, whose longest sequence is `max_position` then, where it is given."""
    model.save_pretrained(target)
    if tokenizer is None:
        say(f"{source} has no tokenizer, so {target} has none either; copy that of the model into it.")
    else:
        tokenizer.save_pretrained(target)
    if not (source / _MODULES).is_file():
        return
    for path in filter(None, (module["path"] for module in _read(source / _MODULES))):
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(
                f"{source / _MODULES}: {path} is not a folder beside it; nothing is copied from elsewhere."
            )
        if (source / path).is_dir():
            shutil.copytree(source / path, target / path)
    for file in (source / _MODULES, *source.glob("config_sentence_transformers.json")):
        shutil.copy(file, target)
    for file in source.glob("sentence_*_config.json"):
        settings = _read(file) | ({} if max_position is None else {"max_seq_length": max_position})
        (target / file.name).write_text(json.dumps(settings, indent=2) + "\n")


def _read(file: Path) -> Any:
    with _or_says(f"{file}: not valid JSON", ValueError):
        return json.loads(file.read_text())


@contextmanager
def _or_says(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Has these errors say what cannot be done, and the first line of why, as a ValueError."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{what}: {reason(error).splitlines()[0]}") from error
