"""`vllm.platforms`: the device that engines run on by default."""

from __future__ import annotations

import platform
from enum import Enum, auto
from typing import Any, NamedTuple

from .helpers import set_random_seed


class PlatformEnum(Enum):
    """Kinds of devices."""

    CUDA = auto()
    ROCM = auto()
    TPU = auto()
    XPU = auto()
    CPU = auto()
    OOT = auto()
    UNSPECIFIED = auto()


class CpuArchEnum(Enum):
    """Kinds of processors."""

    X86 = auto()
    ARM = auto()
    POWERPC = auto()
    S390X = auto()
    RISCV = auto()
    OTHER = auto()
    UNKNOWN = auto()


_MACHINES = {"x86_64": "X86", "amd64": "X86", "aarch64": "ARM", "arm64": "ARM",
             "ppc64le": "POWERPC", "s390x": "S390X", "riscv64": "RISCV"}  # fmt: skip


class DeviceCapability(NamedTuple):
    """The compute capability of a GPU."""

    major: int
    minor: int

    def to_int(self) -> int:
        """Return it as one number, such as 90."""
        return 10 * self.major + self.minor

    def as_version_str(self) -> str:
        """Return it as text, such as "9.0"."""
        return f"{self.major}.{self.minor}"


class Platform:
    """The device that engines run on by default: a GPU with torch's CUDA interface, or the CPU."""

    supported_quantization: tuple[str, ...] = ()
    simple_compile_backend = "inductor"

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        import torch  # noqa: PLC0415

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def device_name(self) -> str:
        """The same; vLLM names the backend here."""
        return self.device_type

    @property
    def _enum(self) -> PlatformEnum:
        kinds = {"is_rocm": PlatformEnum.ROCM, "is_cuda": PlatformEnum.CUDA}
        return next((kind for name, kind in kinds.items() if getattr(self, name)()),
                    PlatformEnum.CPU)  # fmt: skip

    @property
    def dispatch_key(self) -> str:
        """torch's name of the device."""
        return self.device_type.upper()

    @property
    def ray_device_key(self) -> str:
        """Ray's name of the device; none for the CPU."""
        return "GPU" if self.is_cuda_alike() else ""

    @property
    def device_control_env_var(self) -> str:
        """The environment variable that selects devices."""
        return "CUDA_VISIBLE_DEVICES" if self.is_cuda_alike() else "CPU_VISIBLE_MEMORY_NODES"

    @property
    def supported_dtypes(self) -> list[Any]:
        """The types of weights."""
        import torch  # noqa: PLC0415

        return [torch.bfloat16, torch.float16, torch.float32]

    def is_cuda(self) -> bool:
        """Return whether there is a GPU of NVIDIA."""
        return self.is_cuda_alike() and not self.is_rocm()

    def is_rocm(self) -> bool:
        """Return whether there is a GPU of AMD."""
        import torch  # noqa: PLC0415

        return self.is_cuda_alike() and torch.version.hip is not None

    def is_cuda_alike(self) -> bool:
        """Return whether there is a GPU with torch's CUDA interface."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Return whether models run on the processor."""
        return self.device_type == "cpu"

    def _is_another(self) -> bool:
        """Return False: Hardpoint has no such platform."""
        return False

    is_tpu = is_xpu = is_hpu = is_neuron = is_out_of_tree = is_unspecified = _is_another
    is_sleep_mode_available = is_cuda_alike
    is_pin_memory_available = is_cuda_alike

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the GPU's name, or `cpu`."""
        import torch  # noqa: PLC0415

        return torch.cuda.get_device_name(device_id) if self.is_cuda_alike() else "cpu"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Return the compute capability of a GPU; None without one."""
        import torch  # noqa: PLC0415

        if not self.is_cuda_alike():
            return None
        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Return whether a GPU has at least a compute capability."""
        if (current := self.get_device_capability(device_id)) is None:
            return False
        if isinstance(capability, tuple):
            return current >= capability
        return current.to_int() >= capability

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Return the bytes of a GPU's memory, or of this machine's."""
        import torch  # noqa: PLC0415

        from .utilities import get_cpu_memory  # noqa: PLC0415

        if not self.is_cuda_alike():
            return get_cpu_memory()
        return int(torch.cuda.get_device_properties(device_id).total_memory)

    def supports_fp8(self) -> bool:
        """Return whether a GPU multiplies matrices of 8-bit floats."""
        return self.has_device_capability(89)

    def fp8_dtype(self) -> Any:
        """Return the type of 8-bit floats."""
        import torch  # noqa: PLC0415

        return torch.float8_e4m3fn

    def get_cpu_architecture(self) -> CpuArchEnum:
        """Return the kind of the processor."""
        return CpuArchEnum[_MACHINES.get(platform.machine().lower(), "OTHER")]

    def seed_everything(self, seed: int | None = None) -> None:
        """Seed the generators of this process."""
        if seed is not None:
            set_random_seed(seed)


current_platform = Platform()
