"""Worker hooks of step parts, and their access to the worker's model and KV cache."""

from .model.forward import AttentionWeights as AttentionWeights
from .model.forward import Forward as Forward
from .model.forward import ForwardStep as ForwardStep
from .model.forward import PackedInputs as PackedInputs
from .step_part.halves import WorkerHalf
from .step_part.worker import LoadedModel as LoadedModel
from .step_part.worker import ModelOpener as ModelOpener
from .step_part.worker import SequenceModel as SequenceModel
from .step_part.worker import StepModel as StepModel
from .step_part.worker import WorkerHalfContext
from .step_part.worker_data import AllocatedCache as AllocatedCache
from .step_part.worker_data import KVBlocks as KVBlocks
from .step_part.worker_data import StepRows as StepRows

__all__ = ["WorkerHalf", "WorkerHalfContext"]
