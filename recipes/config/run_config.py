"""A run's arguments: one dataclass, filled by defaults < `--config preset.yaml` < flags."""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import yaml

from recipes.config.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class RunConfig:
    """What every recipe that trains can be told. Field names are the flags."""

    config: str | None = field(default=None, metadata={"help": "YAML file with any of these flags; flags win over it"})
    deepspeed_config: str | None = field(
        default=None, metadata={"help": "a JSON of ds_configs/; without it the fitting one is chosen and named"}
    )
    set: list[str] = field(
        default_factory=list, metadata={"help": "override a ds_config key: --set optimizer.params.lr=3e-4"}
    )
    seq_length: int | None = field(
        default=None, metadata={"help": "tokens per sequence; default: the model's longest, at most 4096"}
    )
    max_steps: int | None = field(default=None, metadata={"help": "optimizer steps of the whole run"})
    seed: int = field(default=1234, metadata={"help": "seed of the initial weights and of the data order"})
    global_batch_size: int | None = field(
        default=None, metadata={"help": "sequences per optimizer step; overrides the JSON's train_batch_size"}
    )
    gradient_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "recompute activations in the backward pass: none, full, or selective (keeps attention's); "
            "default: full where the ds_config has a section activation_checkpointing",
            "choices": ["none", "full", "selective"],
        },
    )
    torch_compile: bool = field(
        default=False,
        metadata={"help": "compile the decoder layers at their first run, by torch.compile; needs a C++ compiler"},
    )
    verify_data: str = field(
        default="quick",
        metadata={
            "help": "check prepared data by size (and hash if small), or all hashes",
            "choices": ["quick", "full"],
        },
    )
    mixture_temperature: float = field(
        default=1.0, metadata={"help": "weight sources by size ** (1 / temperature) where --data gives no weights"}
    )
    num_workers: int | None = field(
        default=None, metadata={"help": "processes a rank that prepare batches; default: none on CPU, else by cores"}
    )
    output_dir: str | None = field(default=None, metadata={"help": "the run's folder; default: runs/<model>"})
    save_steps: int = field(default=200, metadata={"help": "steps between checkpoints; the last step always saves"})
    save_total_limit: int = field(default=2, metadata={"help": "checkpoints kept, besides the best; 0 keeps all"})
    async_save: bool = field(
        default=False, metadata={"help": "write checkpoints in the background, from a copy in host memory"}
    )
    save_on_exit_signal: bool = field(
        default=True,
        metadata={
            "help": "on SIGTERM or SIGUSR1 finish the step, save, and exit with code 75; a second one ends at once"
        },
    )
    eval_steps: int = field(default=0, metadata={"help": "steps between evaluations; 0: only at the end"})
    profile: str | None = field(
        default=None,
        metadata={
            "help": "profile these steps, FIRST:LAST (10:13) or a number of them: a trace and a verdict into the run's "
            "folder's profile/"
        },
    )
    log_level: str = field(
        default="info",
        metadata={
            "help": "least level of the log, on rank 0's console and in every rank's file under logs/; debug: a line "
            "for each step, too",
            "choices": ["debug", "info", "warning", "error"],
        },
    )
    empty_cache_steps: int = field(
        default=0, metadata={"help": "GPU: steps between emptyings of torch's memory cache; 0: never"}
    )
    memory_snapshot: bool = field(
        default=False,
        metadata={"help": "GPU: write torch's memory snapshot of the run's end, or of the moment memory ran out"},
    )
    resume: str = field(
        default="auto", metadata={"help": "auto: the newest checkpoint that verifies; never; or a checkpoint's folder"}
    )
    overwrite: bool = field(default=False, metadata={"help": "with --resume never: delete the run that is there"})
    nccl_preset: str = field(
        default="auto",
        metadata={
            "help": "NCCL's environment variables, by network; auto chooses; what you set in the environment wins",
            "choices": ["auto", "none", "single_node", "ethernet", "infiniband", "large", "debug"],
        },
    )
    dist_timeout: int = field(
        default=1800,
        metadata={"help": "seconds that ranks wait for each other; one that stalls longer is named, and the run ends"},
    )
    skip_preflight: bool = field(
        default=False,
        metadata={"help": "leave out the quick checks of this host (disk, memory, locks, port) at the start"},
    )
    spike_window: int = field(
        default=100, metadata={"help": "steps whose median loss tells a spike, once half of them are there; 0: off"}
    )
    spike_deviations: float = field(
        default=6.0, metadata={"help": "standard deviations (from the median absolute one) above it that make a spike"}
    )
    on_spike: str = field(
        default="warn",
        metadata={
            "help": "a spike of the loss: warn and train on, skip its update, or rewind to the newest checkpoint and "
            "pass over the batch",
            "choices": ["warn", "skip", "rewind"],
        },
    )
    max_nonfinite_steps: int | None = field(
        default=None,
        metadata={"help": "steps in a row with NaN or infinity that end the run; default: 50 in fp16, bf16; 1 in fp32"},
    )
    log_group_norms: bool = field(
        default=False,
        metadata={"help": "log the gradient's norm by kind of parameter, too; costs one more reduction a step"},
    )
    deterministic: bool = field(
        default=False, metadata={"help": "let a GPU repeat a run to the bit, at some cost; a CPU does so by itself"}
    )
    dry_run: bool = field(default=False, metadata={"help": "resolve and check everything, print it, start nothing"})
    json: bool = field(default=False, metadata={"help": "print the result as one JSON line, too"})
    local_rank: int = field(default=0, metadata={"help": "set by the launcher"})

    def to_dict(self) -> dict[str, Any]:
        """The arguments as written into run.json (the launcher's own left out)."""
        return {key: value for key, value in asdict(self).items() if key != "local_rank"}

    def faults(self) -> list[str]:
        """What is wrong with single values, a line each."""
        faults = at_least(self, 1, "seq_length", "max_steps", "global_batch_size", "save_steps", "dist_timeout")
        faults += at_least(self, 1, "max_nonfinite_steps")
        faults += at_least(self, 0, "num_workers", "save_total_limit", "eval_steps", "seed")
        faults += at_least(self, 0, "spike_window", "empty_cache_steps")
        if not self.spike_deviations > 0:
            faults.append(f"--spike_deviations {self.spike_deviations}: must be above 0, such as 6")
        if self.on_spike != "warn" and not self.spike_window:
            faults.append(f"--on_spike {self.on_spike} with --spike_window 0: no spike is ever found; write 100")
        if self.overwrite and self.resume != "never":
            faults.append(f"--overwrite with --resume {self.resume}: it deletes the run; write --resume never with it")
        return faults

    @property
    def ds_overrides(self) -> list[str]:
        """KEY=VALUE for the ds_config, from --set and from flags that stand for it; later ones win."""
        return self.set

    @property
    def default_folder_name(self) -> str:
        """Under runs/, of a run without --output_dir."""
        raise NotImplementedError


def at_least(config: Any, least: int, *names: str) -> list[str]:
    """A fault for each of the fields that is given and lower."""
    values = {name: getattr(config, name) for name in names}
    return [f"--{n} {v}: must be at least {least}" for n, v in values.items() if v is not None and v < least]


@dataclass
class PretrainConfig(RunConfig):
    """What `recipes/pretrain.py` can be told beside that."""

    model: str = field(default="tiny", metadata={"help": "preset of model/presets/ or a config.json"})
    init_from: str | None = field(
        default=None, metadata={"help": "begin with the weights of a Hugging Face folder, a run or a checkpoint"}
    )
    data: list[str] = field(
        default_factory=lambda: ["stdlib"],
        metadata={
            "help": "prepared folders, files (jsonl, txt, parquet), folders or hub ids, each with an optional =weight; "
            "'stdlib' is the Python standard library's sources on this machine"
        },
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer folder or hub id; default: byte-level BPE trained on the data"}
    )
    train_tokens: int | None = field(default=None, metadata={"help": "length of the run in tokens, or --max_steps"})
    batch_ramp: str | None = field(
        default=None,
        metadata={"help": "START:TOKENS, a global batch that grows from START sequences over so many tokens"},
    )
    lr_scaling: str = field(
        default="sqrt", metadata={"help": "learning rate against global batch", "choices": ["sqrt", "linear", "none"]}
    )
    reference_batch_size: int = field(default=256, metadata={"help": "global batch at which the JSON's lr holds"})
    lr_follows_batch: bool = field(
        default=False, metadata={"help": "during --batch_ramp scale the learning rate with the batch of each step"}
    )
    bias_update_until_tokens: float | None = field(
        default=None, metadata={"help": "tokens after which the expert bias stands still; DeepSeek-V3: 14.3e12"}
    )
    mtp_loss_weight_later: str | None = field(
        default=None,
        metadata={"help": "WEIGHT:TOKENS, the MTP loss's weight from so many tokens on; DeepSeek-V3: 0.1:10e12"},
    )
    document_mask: bool = field(
        default=False, metadata={"help": "keep attention inside a document; off as in DeepSeek-V3"}
    )
    text_key: str = field(default="text", metadata={"help": "key or column of the text in jsonl, csv and parquet"})
    holdout: float = field(default=0.1, metadata={"help": "part of the documents held out, by the hash of their text"})
    eval_tokens: int = field(
        default=2_000_000,
        metadata={"help": "held-out tokens that an evaluation takes, evenly from all of them; 0: every one"},
    )
    on_error: str = field(
        default="stop",
        metadata={"help": "a bad record in the data: stop, replace or skip", "choices": ["stop", "replace", "skip"]},
    )
    packing: str = field(
        default="concatenate",
        metadata={
            "help": "concatenate and cut documents as DeepSeek-V3 does, or fit them whole where they fit",
            "choices": ["concatenate", "best_fit"],
        },
    )
    fim_rate: float = field(
        default=0.0, metadata={"help": "part of documents rearranged for fill-in-the-middle; DeepSeek-V3: 0.1"}
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "keep an exponential moving average of the weights on the CPU, with this decay a step"},
    )
    ema_steps: int | None = field(
        default=None,
        metadata={"help": "steps between updates of that average, each of which gathers the fp32 weights; default: 10"},
    )

    def faults(self) -> list[str]:
        """As RunConfig.faults."""
        faults = super().faults() + at_least(self, 1, "train_tokens", "reference_batch_size", "ema_steps")
        faults += at_least(self, 0, "eval_tokens")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            faults.append(f"--ema_decay {self.ema_decay}: must be above 0 and below 1")
        if self.ema_steps is not None and self.ema_decay is None:
            faults.append(f"--ema_steps {self.ema_steps}: there is no average without --ema_decay; give it too")
        if self.max_steps and self.train_tokens:
            faults.append("--max_steps and --train_tokens: both state the length of the run; give one")
        if not self.data:
            faults.append("--data: needs at least one source")
        return faults

    @property
    def default_folder_name(self) -> str:
        """The model's name."""
        return Path(self.model).stem


Config = TypeVar("Config", bound=RunConfig)


def _yaml_arguments(path: str, known: set[str]) -> list[str]:
    """A preset's content as command-line words, so that one parser checks both."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); give a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: must be a mapping of flag names to values, is a {type(content).__name__}")
    faults = [f"{path}: {_unknown(str(key), known, prefix='')}" for key in content if key not in known]
    if faults:
        raise UserError(*faults)
    words: list[str] = []
    for key, value in content.items():
        if value is not None:
            words += [f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def _unknown(name: str, known: set[str], prefix: str = "--") -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {prefix}{close[0]}?" if close else "; see --help"
    return f"unknown flag {prefix}{name}{hint}"


def parse_pretrain_config(argv: Sequence[str] | None = None) -> PretrainConfig:
    """Parse pretrain.py's command line; see parse_config."""
    return parse_config(
        PretrainConfig,
        argv,
        prog="recipes/pretrain.py",
        description="Pre-train a DeepSeek-style transformer. Without any flag: the tiny model on the Python "
        "standard library's sources.",
    )


def parse_config(kind: type[Config], argv: Sequence[str] | None, *, prog: str, description: str) -> Config:
    """Parse a command line (default: this process's) into one of the dataclasses above.

    Raises:
        UserError: an unknown flag or key, a value of the wrong type or out of its range.
    """
    # transformers takes seconds to import; a command that only prints its faults should not wait for more of it.
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            # argparse names both spellings of a flag; one is enough
            raise UserError(re.sub(r"^argument (--\w+)\S*:", r"\1:", message))

    # mypy: transformers types the dataclass argument too narrowly
    parser = Parser(
        cast(Any, kind),
        prog=prog,
        description=description,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    flags = {f.name: f for f in fields(kind)}
    # HfArgumentParser would let a second --set replace the first
    parser.add_argument("--set", nargs="+", action="extend", help=flags["set"].metadata["help"])
    known = set(flags)
    words = list(sys.argv[1:] if argv is None else argv)

    preset = _value_of(words, "--config")
    from_preset = _yaml_arguments(preset, known) if preset else []
    if from_preset:
        try:
            parser.parse_known_args(from_preset)
        except UserError as error:
            raise UserError(*(f"{preset}: {fault}" for fault in error.faults)) from None
    namespace, rest = parser.parse_known_args(from_preset + words)
    if rest:
        unknown = [_unknown(word.split("=")[0].lstrip("-"), known) for word in rest if word.startswith("-")]
        raise UserError(*(unknown or [f"unexpected argument {rest[0]!r}; every value belongs to a flag"]))
    values = {key: value for key, value in vars(namespace).items() if key in known}
    values["set"] = values["set"] or []
    config = kind(**values)
    if faults := config.faults():
        raise UserError(*faults)
    return config


def _value_of(words: list[str], flag: str) -> str | None:
    """The value of one flag, looked up before the full parse."""
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1]
    return None


def run_folder(config: RunConfig) -> Path:
    """The run's folder: `--output_dir`, or runs/<model> beside the recipes."""
    if config.output_dir:
        return Path(config.output_dir).expanduser().resolve()
    return REPOSITORY / "runs" / config.default_folder_name
