"""fp16 on CPUs without units for it: PyTorch computes in it on every one, but DeepSpeed wants the units."""


def allow_fp16() -> None:
    """Let this process train in fp16 whatever its CPU; to be called after quiet_deepspeed()."""
    from deepspeed.accelerator import get_accelerator

    from recipes.cluster import launch

    if get_accelerator().device_name() == "cpu":
        type(get_accelerator()).is_fp16_supported = lambda self: True
        launch._cpu_has_fp16 = lambda: True
