"""What `recipes/finetune.py` can be told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from recipes.config.run_config import RunConfig, at_least, parse_config

# For models of billions of parameters, which forget quickly; this project's choice.
DEFAULT_EPOCHS = 2.0
DEFAULT_LEARNING_RATE = 5e-6
LAST_RATIO = 0.2


@dataclass
class FinetuneConfig(RunConfig):
    """A fine-tuning run's arguments; field names are the flags."""

    init_from: str | None = field(
        default=None,
        metadata={"help": "the model to begin with: a run's, a checkpoint's or a Hugging Face folder; must be given"},
    )
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "conversations: jsonl, .json or parquet files, folders or hub ids, each with an optional =weight; "
            "records have 'messages', or 'instruction' or 'prompt' with 'output', 'response' or 'completion'"
        },
    )
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "conversations to evaluate on instead of a held-out part of --data"}
    )
    holdout: float | None = field(
        default=None, metadata={"help": "part of the conversations held out; default: 0.1, with --eval_data 0"}
    )
    on_error: str = field(
        default="stop", metadata={"help": "a bad record in the data: stop, or skip it", "choices": ["stop", "skip"]}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer folder or hub id; default: the one beside the weights"}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "a Jinja file; default: the tokenizer's own, or else DeepSeek-V2's"}
    )
    num_train_epochs: float = field(
        default=DEFAULT_EPOCHS, metadata={"help": "length of the run; --max_steps overrides it"}
    )
    learning_rate: float = field(
        default=DEFAULT_LEARNING_RATE,
        metadata={
            "help": "peak, after which it falls along a cosine to a fifth; it takes the place of the ds_config's rate "
            "and schedule, which are for pre-training. The default is for large models; LoRA and small ones take more"
        },
    )
    mtp_loss_weight: float | None = field(
        default=None, metadata={"help": "weight of multi-token prediction's loss on the answers; default: the model's"}
    )
    bias_update_speed: float = field(
        default=0.0,
        metadata={"help": "step of the experts' balancing bias; DeepSeek-V3 ends pre-training with 0, the default"},
    )
    lora_rank: int = field(
        default=0, metadata={"help": "train low-rank adapters of this rank instead of the weights; needs `peft`"}
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "adapters are scaled by alpha / rank; default: twice the rank"}
    )
    lora_target: list[str] = field(
        default_factory=list,
        metadata={"help": "layers that get adapters, by the end of their name; default: the attention's projections"},
    )

    # What pretrain.py can be told and fine-tuning does in one way only.
    batch_ramp: ClassVar[None] = None
    lr_scaling: ClassVar[str] = "none"
    reference_batch_size: ClassVar[int] = 256
    lr_follows_batch: ClassVar[bool] = False
    bias_update_until_tokens: ClassVar[None] = None
    mtp_loss_weight_later: ClassVar[None] = None
    document_mask: ClassVar[bool] = True
    eval_tokens: ClassVar[int] = 0
    packing: ClassVar[str] = "best_fit"
    fim_rate: ClassVar[float] = 0.0
    ema_decay: ClassVar[None] = None
    ema_steps: ClassVar[None] = None

    @property
    def model(self) -> str:
        """Where the architecture is from, for the lines that name it."""
        return str(self.init_from)

    @property
    def default_folder_name(self) -> str:
        """The name of the folder that it begins from, and what was done with it."""
        return f"{Path(str(self.init_from)).resolve().name}_finetuned"

    @property
    def holdout_share(self) -> float:
        """The part of --data that is held out."""
        if self.holdout is not None:
            return self.holdout
        return 0.0 if self.eval_data else 0.1

    @property
    def ds_overrides(self) -> list[str]:
        """`--set` as if the user had written the learning rate there; his own come after."""
        schedule = f'{{"type": "cosine", "params": {{"min_ratio": {LAST_RATIO}}}}}'
        return [f"scheduler={schedule}", f"optimizer.params.lr={self.learning_rate}", *self.set]

    def faults(self) -> list[str]:
        """As RunConfig.faults."""
        faults = super().faults() + at_least(self, 0, "bias_update_speed", "mtp_loss_weight", "lora_rank")
        if not self.init_from:
            faults.append("--init_from: give the model to begin with: a run's, a checkpoint's or a Hugging Face folder")
        if not self.data:
            faults.append("--data: give at least one file of conversations")
        if not 0.0 <= self.holdout_share < 1.0:
            faults.append(f"--holdout {self.holdout}: must be at least 0 and below 1")
        if self.eval_data and self.holdout:
            faults.append(f"--holdout {self.holdout} with --eval_data: both say what to evaluate on; give one")
        for name in ("learning_rate", "num_train_epochs"):
            if not getattr(self, name) > 0:
                faults.append(f"--{name} {getattr(self, name)}: must be above 0")
        if not self.lora_rank:
            given = [name for name in ("lora_alpha", "lora_target") if getattr(self, name)]
            faults += [f"--{name}: there are no adapters without --lora_rank; give it too" for name in given]
        return faults


def parse_finetune_config(argv: Sequence[str] | None = None) -> FinetuneConfig:
    """Parse finetune.py's command line; see parse_config."""
    return parse_config(
        FinetuneConfig,
        argv,
        prog="recipes/finetune.py",
        description="Fine-tune a model on conversations: loss on the assistant's turns only, packed, and each "
        "conversation attending to itself alone.",
    )
