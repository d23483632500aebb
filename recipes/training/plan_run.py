"""Everything that can be decided before a process starts anything: one object, checked as a whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ConfigError, ModelConfig, load_model_config
from model.flops import count_parameters
from recipes.cluster.launch import Launch, device_dtypes, device_type, prefers_bf16
from recipes.cluster.nccl_presets import NcclPreset, choose_preset, count_nodes, read_fabric
from recipes.cluster.op_builds import has_compiler, has_libaio, has_nvcc
from recipes.cluster.preflight import RunNeeds
from recipes.config.batch_plan import BatchRamp
from recipes.config.ds_check import (
    autoep_size,
    autotp_size,
    offloads_to_nvme,
    precision,
    ranks_per_sequence,
    zero_stage,
)
from recipes.config.ds_config import (
    ResolvedDsConfig,
    RunFacts,
    apply_overrides,
    choose_ds_config,
    load_ds_config,
    resolve_ds_config,
)
from recipes.config.errors import UserError
from recipes.config.finetune_config import FinetuneConfig
from recipes.config.instrument_flags import check_instruments
from recipes.config.parallel_check import flag_faults
from recipes.config.run_config import PretrainConfig, RunConfig, run_folder
from recipes.data.loader import default_num_workers
from recipes.training.checkpoint_files import CheckpointError, TrainingState, read_state
from recipes.training.data_sources import check_data
from recipes.training.optimizer import GROUPING
from recipes.training.resume import (
    architecture_differences,
    check_convertible,
    check_fresh_folder,
    check_same_run,
    find_candidates,
)
from recipes.training.schedule import Schedule, build_schedule
from recipes.training.token_schedules import follow_batch, parse_later_weight
from recipes.training.trained_model import open_weights, without_mtp

DEFAULT_MAX_STEPS = 500  # the default run: minutes on two CPU cores
LONGEST_DEFAULT_SEQUENCE = 4096  # what DeepSeek's models are pre-trained with


@dataclass(frozen=True)
class RunPlan:
    """A run, resolved and checked."""

    config: PretrainConfig | FinetuneConfig
    launch: Launch
    device_type: str
    folder: Path
    model: ModelConfig
    seq_length: int
    ds_config_source: str
    resolved: ResolvedDsConfig
    candidates: list[Path]  # checkpoints to resume from, best first; rank 0 finds them, start_run tells the others
    nccl: NcclPreset

    @property
    def schedule(self) -> Schedule:
        """The learning rate over the run."""
        batches = self.resolved.batch_plan
        schedule = build_schedule(
            self.resolved.scheduler, self.resolved.max_steps, tokens_at_step=batches.tokens_before
        )
        if not self.config.lr_follows_batch:
            return schedule
        return Schedule(schedule.name, follow_batch(schedule.multiplier, batches, self.config.lr_scaling))

    @property
    def num_workers(self) -> int:
        """Processes a rank that load batches."""
        if self.config.num_workers is not None:
            return self.config.num_workers
        return default_num_workers(self.device_type, self.launch.local_world_size)

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the resolved ds_config."""
        return zero_stage(self.resolved.config)

    @property
    def dtype(self) -> str:
        """`fp16`, `bf16` or `fp32`, as the resolved ds_config turns on."""
        return precision(self.resolved.config)

    @property
    def autoep_size(self) -> int:
        """Ranks that share one set of experts; 0 where AutoEP is off."""
        return autoep_size(self.resolved.config)

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that have sequences of their own; a rank is a group where none share a model."""
        return self.launch.world_size // ranks_per_sequence(self.resolved.config)

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to; consecutive ranks make a group."""
        return self.launch.rank // ranks_per_sequence(self.resolved.config)

    @property
    def needs(self) -> RunNeeds:
        """What the run will ask of its hosts."""
        counts = count_parameters(self.model)
        if self.zero_stage == 3:
            rank_parameters = 0  # each is shared out as soon as it is made
        else:  # of the experts that a token leaves idle a rank begins with its own part (`own_experts`)
            rank_parameters = counts.mtp + counts.active + (counts.total - counts.active) // max(1, self.autoep_size)
        return RunNeeds(
            folder=self.folder,
            ds_config=self.resolved.config,
            device_type=self.device_type,
            parameters=counts.total + counts.mtp,
            rank_parameters=rank_parameters,
            checkpoints=max(1, self.config.save_total_limit) + 1,
            loader_processes=self.num_workers,
        )

    @property
    def layout(self) -> dict[str, Any]:
        """What a native DeepSpeed checkpoint is tied to."""
        return {
            "world_size": self.launch.world_size,
            "zero_stage": self.zero_stage,
            "dtype": self.dtype,
            "autoep_size": self.autoep_size,
            "autotp_size": autotp_size(self.resolved.config),
            "grouping": GROUPING,
        }

    def saved_state(self) -> TrainingState | None:
        """Where the run stands that this one goes on from."""
        return read_state(self.candidates[0]) if self.candidates else None


def plan_run(config: PretrainConfig, launch: Launch) -> RunPlan:
    """Resolve and check a pre-training run without starting or writing anything.

    Raises:
        UserError: with everything that is wrong.
    """
    model = _load_model(config.model)
    check_data(config)
    if config.mtp_loss_weight_later:
        parse_later_weight(config.mtp_loss_weight_later)
    if config.init_from:
        _check_initial_weights(config.init_from, model)
    max_steps = config.max_steps or (None if config.train_tokens else DEFAULT_MAX_STEPS)
    return resolve_run(config, launch, model, max_steps=max_steps, train_tokens=config.train_tokens)


def choose_seq_length(config: RunConfig, model: ModelConfig) -> int:
    """Tokens per sequence: as the flag says, or the most that the model takes, up to what DeepSeek pre-trains with.

    Raises:
        UserError: more than the model takes.
    """
    seq_length = config.seq_length or min(model.max_position_embeddings, LONGEST_DEFAULT_SEQUENCE)
    if seq_length > model.max_position_embeddings:
        raise UserError(
            f"--seq_length {seq_length}: the model takes at most {model.max_position_embeddings} positions "
            "(max_position_embeddings)"
        )
    return seq_length


def resolve_run(
    config: PretrainConfig | FinetuneConfig,
    launch: Launch,
    model: ModelConfig,
    *,
    max_steps: int | None,
    train_tokens: int | None,
) -> RunPlan:
    """Resolve and check what every recipe that trains shares: lengths, folder, ds_config, what to resume from.

    Args:
        max_steps, train_tokens: the run's length, one of the two.
    Raises:
        UserError: with everything that is wrong.
    """
    seq_length = choose_seq_length(config, model)
    folder = run_folder(config)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder}: is a file; give a folder")
    device = device_type()
    source = config.deepspeed_config or str(choose_ds_config(device, launch.world_size, prefers_bf16()))
    ds_config = apply_overrides(load_ds_config(source), config.ds_overrides)
    facts = RunFacts(
        world_size=launch.world_size,
        device_type=device,
        device_dtypes=device_dtypes(),
        model=model,
        seq_length=seq_length,
        global_batch_size=config.global_batch_size,
        max_steps=max_steps,
        train_tokens=train_tokens,
        lr_scaling=config.lr_scaling,
        reference_batch_size=config.reference_batch_size,
        compiler_available=has_compiler(),
        nvcc_available=has_nvcc(),
        async_io_available=offloads_to_nvme(ds_config) and has_libaio(),
        output_dir=folder,
        batch_ramp=BatchRamp.parse(config.batch_ramp) if config.batch_ramp else None,
    )
    resolved = resolve_ds_config(ds_config, source=source, facts=facts)
    check_fresh_folder(folder, config.resume, config.overwrite)
    if faults := flag_faults(resolved.config, config):
        raise UserError(*faults)
    # One rank's view of the folder counts: other hosts may see a shared one a little earlier or later.
    candidates = find_candidates(folder, config.resume) if launch.is_main else []
    newest = candidates[0] if candidates else None
    if config.resume != "never":
        check_same_run(folder, newest, model)
    fabric = read_fabric(count_nodes(launch.world_size, launch.local_world_size), device)
    nccl = choose_preset(config.nccl_preset, fabric, zero_stage(resolved.config))
    plan = RunPlan(config, launch, device, folder, model, seq_length, source, resolved, candidates, nccl)
    if config.torch_compile:
        _check_compiles(plan)
    if newest:
        try:
            check_convertible(newest, read_state(newest), plan.layout, resolved.config)
        except CheckpointError as error:
            raise UserError(str(error)) from None
    state = plan.saved_state()
    check_instruments(config, device, state.step if state else 0, resolved.max_steps)
    return plan


def _check_initial_weights(path: str, model: ModelConfig) -> None:
    """Refuse weights of another architecture; MTP layers may be missing on either side."""
    different = architecture_differences(without_mtp(open_weights(path).config), without_mtp(model))
    if different:
        raise UserError(f"--init_from {path}: another architecture than --model ({', '.join(different[:3])})")


def _load_model(name: str) -> ModelConfig:
    try:
        return load_model_config(name)
    except ConfigError as error:
        raise UserError(*(f"--model {name}: {fault}" for fault in error.faults)) from None


def _check_compiles(plan: RunPlan) -> None:
    if not has_compiler():
        raise UserError("--torch_compile: needs a C++ compiler and ninja on PATH; install them, or leave the flag out")
    if plan.autoep_size:
        raise UserError(
            "--torch_compile: with expert_parallel, whose grouped products torch.compile does not trace in float32; "
            "leave one of them out"
        )
    if plan.device_type == "cuda" and plan.dtype != "bf16" and plan.model.n_routed_experts:
        raise UserError(
            f"--torch_compile: in {plan.dtype} on a GPU, where torch.compile traces the experts' grouped products in "
            "bf16 only; take a bf16 ds_config, or leave the flag out"
        )
