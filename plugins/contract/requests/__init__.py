"""Data of requests: parameters, engine messages, the plan of a step and statistics."""

from .lora import AdapterScale, LoRARequest
from .markers import ReasoningMarkers, ReasoningTracker
from .markers import ReasoningPosition as ReasoningPosition
from .media import Image as Image
from .media import (
    ImageSource,
    MultiModalFeature,
)
from .media_format import MediaFormat
from .options import ChatOptions as ChatOptions
from .options import ChatRequestOptions as ChatRequestOptions
from .options import RequestOptions as RequestOptions
from .outputs import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprob,
    PartArray,
    RequestOutput,
    ToolCall,
)
from .outputs import PoolingRequestOutput as PoolingRequestOutput
from .outputs import TokenLogprobs as TokenLogprobs
from .params import (
    EngineCoreRequest,
    PoolingParams,
    RepetitionDetection,
    RequestOutputKind,
    SamplingParams,
    ids_after_embeddings,
)
from .params import Prompt as Prompt
from .params import Retention as Retention
from .plan import BlockIds as BlockIds
from .plan import (
    CachedRequests,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    RequestFault,
    SchedulerOutput,
)
from .plan import PartData as PartData
from .plan import SampledTokens as SampledTokens
from .request import (
    Request,
    RequestStatus,
)
from .resumed import ResumedOutputs as ResumedOutputs
from .resumed import (
    WeightRun,
)
from .stats import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineReport,
    FinishedRequest,
    IterationStats,
    KVTierStats,
    PrefillStats,
    PrefixCacheStats,
    RequestMetrics,
    SchedulerStats,
)
from .stats import Health as Health
from .stats import PluginMeter as PluginMeter
from .stats import PluginReport as PluginReport
from .stats import StepFault as StepFault
from .structured import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    SequenceFormat,
    StarFormat,
    StructuralTag,
    StructuredOutputs,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
    walk_formats,
)
from .structured import StructuredFormat as StructuredFormat

__all__ = [
    "AdapterScale",
    "AnyTextFormat",
    "CachedRequests",
    "CompletionOutput",
    "ConstStringFormat",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineReport",
    "FinishReason",
    "FinishedRequest",
    "Format",
    "GrammarBitmask",
    "GrammarFormat",
    "ImageSource",
    "IterationStats",
    "JsonSchemaFormat",
    "KVTierStats",
    "LoRARequest",
    "Logprob",
    "MediaFormat",
    "ModelRunnerOutput",
    "MultiModalFeature",
    "NewRequest",
    "OptionalFormat",
    "OrFormat",
    "PartArray",
    "PlusFormat",
    "PoolingParams",
    "PoolingRequestOutput",
    "PrefillStats",
    "PrefixCacheStats",
    "ReasoningMarkers",
    "ReasoningTracker",
    "RegexFormat",
    "RepetitionDetection",
    "Request",
    "RequestFault",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "SequenceFormat",
    "StarFormat",
    "StructuralTag",
    "StructuredOutputs",
    "TagFormat",
    "TagsWithSeparatorFormat",
    "TokenFormat",
    "ToolCall",
    "TriggeredTagsFormat",
    "WeightRun",
    "ids_after_embeddings",
    "walk_formats",
]
