"""Samplers, attention backends, models and loaders with one mistake each fail their rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from support.broken import (
    attention,
    loaders,
    media_models,
    models,
    ops,
    samplers,
    shared_models,
    state_models,
)
from support.kit_suites import (
    GENERAL,
    assert_fails,
    each_broken,
    label,
    message_of,
    messages_of,
    shorten,
    suite_tests,
)

from hardpoint.testing import (
    AttentionBackendSuite,
    ModelSuite,
    OpsSuite,
    SamplerSuite,
    WeightLoaderSuite,
)

# component, test that it fails, rule, pattern of the message
SAMPLERS = [
    (samplers.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (samplers.Int32, "result", "result", r"returned torch.int32 \[\d\] .*, expected torch.int64"),
    (samplers.Column, "result", "result", r"int64 \[\d, 1\] on cpu for \d rows"),
    (samplers.OnMeta, "result", "result", r"int64 \[\d\] on meta for \d rows of logits on cpu"),
    (samplers.Beyond, "result", "result", r"token \d+, the vocabulary is 0 to 130"),
    (samplers.Lists, "result", "result", r"returned \[.*\], no tensor"),
    (samplers.TakesTheLeast, "greedy", "greedy", r"got token \d+ with logit -.*, the likeliest is"),
    (samplers.OffByOne, "greedy", "greedy", r"got token \d+ with logit .*, the likeliest is"),
    (samplers.IgnoresGreedy, "greedy", "greedy", r"got token \d+ with logit .*, the likeliest is"),
    (samplers.LastOfEquals, "greedy", "greedy", "of equal logits the lowest id wins"),
    (samplers.TakesTheLeast, "masked", "masked", "with logit -inf; 5 of 131 tokens are left"),
    (samplers.DrawsMasked, "masked", "masked", "with logit -inf; 5 of 131 tokens are left"),
    (samplers.NoiseByRow, "rows", "rows", r"got token \d+ alone, \d+ as row \d of \d"),
    (samplers.NoiseOfTheBatch, "rows", "rows", r"got token \d+ alone, \d+ as row \d of \d"),
    (samplers.GlobalGenerator, "seeds", "seeds", "for the same logits, seeds and positions it"),
    (samplers.IgnoresTheSeed, "seeds", "seeds", "64 seeds at one position all drew token"),
    (samplers.IgnoresThePosition, "seeds", "seeds", "one seed at 64 positions all drew token"),
    (samplers.AlwaysGreedy, "seeds", "seeds", "64 seeds at one position all drew token 0"),
    (samplers.Flatter, "frequencies", "frequencies", r"\d+ draws .* gave token \d+ .* times"),
    (samplers.TakesTheLeast, "frequencies", "frequencies", "seeds 0 to 2047 gave"),
    (samplers.IgnoresTheSeed, "frequencies", "frequencies", "seeds 0 to 2047 gave"),
    (samplers.AddsSeedAndPosition, "independence", "seeds", "seed s at p . 1 and seed s"),
    (samplers.Multinomial, "unusable_rows", "exceptions", "RuntimeError: probability tensor conta"),
    (samplers.HidesNan, "unusable_rows", "unusable rows", "row that contains NaN it chose token"),
    (samplers.SharesStates, "states", "states", "a fork that went on changed the states in step"),
    (samplers.CountsTogether, "states", "states", r"got the tokens \[.*\] in a batch, and"),
    (samplers.EditsLogits, "reads_only", "reads only", "sample changed the logits"),
    (samplers.SeedsTheGlobalGenerator, "reads_only", "reads", "changed torch's global random st"),
    (samplers.Hoards, "memory", "memory", r"grew from \d+ to \d+ elements in 100 steps"),
    (samplers.Slow, "speed", "speed", r"a row of 32000 logits cost \d+ microseconds, the budget"),
]  # fmt: skip

CODES = (
    *(attention.ScalesTokens, attention.OwnUncoded),
    *(attention.KeepsScales, attention.ScalesOfValues),
)

OPS = [
    (ops.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (ops.NoDevices, "contract", "contract", "it states no devices; add `devices = "),
    (ops.ForgetsTheBias, "linear", "values", r"linear differs by .* it gave .*, the formula"),
    (
        ops.IgnoresOutDtype,
        "linear",
        "result",
        r"returned torch.bfloat16 .*, expected torch.float32",
    ),
    (ops.TransposesTheMatrix, "linear", "result", r"returned torch.float32 \[3, 1\] .* \[1, 3\]"),
    (ops.ReadsContiguousRows, "linear", "values", r"linear differs by .* at row [12]"),
    (ops.MultipliesInBfloat16, "linear", "values", r"linear differs by .* at row 0"),
    (ops.NamesNoBuild, "linear", "kept", "two components name their layouts"),
    (ops.PacksAView, "linear", "kept", "pack returned a tensor that is not contiguous"),
    (ops.KeepsAMatrixAside, "linear", "kept", "two components packed one matrix into other bytes"),
    (ops.ForgetsOffsets, "codes", "values", r"linear of codes \(\d bits with \w+\) differs by"),
    (ops.StacksBackwards, "codes", "values", r"linear of codes \(stacked forms\) differs by"),
    (ops.ScalesPartsInPlace, "codes", "in place", "pack_codes changed its parts"),
    (ops.KeepsCodesAside, "codes", "kept", "two components packed one matrix into other bytes"),
    (ops.RecordsFirstResult, "codes", "repeated", "of codes, record's result gave another one"),
    (ops.MultipliesCodesWithTheBatch, "codes", "values|rows", r"linear of codes \(stacked forms\)"),
    (ops.ReadsTheNextRow, "embedding", "values", r"embedding of codes \(8 bits\) differs by"),
    (ops.ReadsInFloat, "embedding", "result", r"embedding .* torch.float32 .* torch.bfloat16"),
    (ops.GathersTheFirstRows, "gather_rows", "values", "gather_rows differs by"),
    (ops.RoundsTheTable, "gather_rows", "result", "gather_rows returned torch.bfloat16"),
    (
        ops.HasSizesBeyondTheMost,
        "record",
        "sizes",
        r"record_sizes\(1\) gave \[1, 2, 4\]",
    ),
    (ops.RepeatsNothing, "record", "repeated", "gave another result than running"),
    (ops.NormalisesTheBatch, "rms_norm", "values", r"rms_norm differs by"),
    (ops.NormOfTheMean, "rms_norm", "values", r"rms_norm differs by .* at row 0"),
    (ops.AddsToACopy, "add_rms_norm", "values", "x after add_rms_norm differs by"),
    (ops.AddsToDelta, "add_rms_norm", "in place", "add_rms_norm changed delta"),
    (ops.RotatesPairs, "rotate", "values", "rotate differs by"),
    (ops.RotatesACopy, "rotate", "values", "rotate differs by"),
    (ops.RotatesAll, "rotate", "in place", "rotate changed other heads"),
    (ops.RotatesContiguousHeads, "rotate", "values", "rotate differs by"),
    (ops.ScalesACopy, "scale", "values", "scale differs by"),
    (ops.ScalesWiderRows, "scale", "in place", "scale changed the memory next to x"),
    (ops.AddsTwice, "add", "values", "add differs by"),
    (ops.EmptiesDelta, "add", "in place", "add changed delta"),
    (ops.GateLast, "gates", "values", "silu_and_mul differs by"),
    (ops.ExactGelu, "gates", "values", "gelu_and_mul differs by"),
    (ops.WritesToX, "gates", "in place", "silu_and_mul changed x"),
    (ops.GivesExpertsEqualWeights, "experts", "values", "experts differs by"),
    (ops.TakesTheLastExpertForNone, "experts", "values", "experts differs by"),
    (ops.GivesAllRowsTheFirstAdapter, "lora", "values", "add_lora differs by"),
    (ops.TakesTheFirstAdapterForNone, "lora", "values", "add_lora differs by"),
    (ops.SpoilsTheInputs, "lora", "in place", "add_lora changed x"),
    (ops.WritesWiderRows, "lora", "in place", "add_lora changed the memory next to y"),
    (ops.SeesOtherSequences, "attend_within", "values", "attend_within differs by"),
    (ops.SeesOneMore, "attend_within", "values", "attend_within differs by"),
    (ops.AttendsInFloat64, "attend_within", "result", "expected the same shape, torch.float32"),
    (ops.ScalesTheQueries, "attend_within", "in place", "attend_within changed q, k or v"),
    (ops.MultipliesByZeroForNone, "lora_rows", "rows", "with other adapters of NaN differs by nan"),
    (ops.ReadsContiguousAdapters, "lora_rows", "rows", "add_lora with parts of matrices differs"),
    (ops.ArgmaxTakesTheLast, "argmax", "tokens", r"argmax returned token \d+ for row 0 of 1, in"),
    (ops.ArgmaxPassesOverNaN, "argmax", "tokens", r"argmax returned token \d+ for row"),
    (ops.ArgmaxInInt32, "argmax", "result", r"argmax returned torch.int32 .* torch.int64 \[1\]"),
    (ops.DrawsByRow, "draw", "tokens", r"draw returned token \d+ for row \d of 3"),
    (ops.DrawsGreedyRows, "draw", "tokens", r"draw returned token \d+ for row 1 of"),
    (ops.DrawScales, "draw", "in place", "draw changed logits"),
    (ops.TopKDropsTies, "top_k", "tokens", r"keep_top_k of \d+ left -inf of token"),
    (ops.TopKOfTheLargest, "top_k", "tokens", r"keep_top_k of 1 left .* expected -inf"),
    (ops.TopPStopsBefore, "top_p", "tokens", r"keep_top_p of 0.9 left -inf of token"),
    (ops.TopPInHalf, "top_p", "tokens", "keep_top_p of 0.9 left"),
    (ops.MinPOfTheSum, "min_p", "tokens", r"keep_min_p of 0\.1 left -inf of token"),
    (ops.MinPReturnsACopy, "min_p", "tokens", r"keep_min_p of 0\.1 left .* expected -inf"),
    (ops.KeepsInTheFirstRows, "keep_tokens", "tokens", r"keep_tokens in rows \[.* of token"),
    (ops.KeepsWholeColumns, "keep_tokens", "tokens", r"keep_tokens in rows .* expected -inf"),
    (ops.KeepsByAdding, "keep_tokens", "tokens", r"keep_tokens in rows .* expected -inf"),
    (ops.ClearsTheBitmask, "keep_tokens", "in place", "keep_tokens changed another argument"),
    (ops.EditsByRow, "edit", "tokens", r"edit with Op.ADD of rows \[.* left"),
    (ops.AddsForSet, "edit", "tokens", r"edit with Op.SET of rows \[.* left"),
    (ops.KeepsOnlyInAllRows, "edit", "tokens", r"edit with Op.KEEP_ONLY of rows .* left -inf of"),
    (ops.EditsAndEmptiesValues, "edit", "in place", "edit changed another argument"),
    (ops.DividesByTheFirst, "divide", "tokens", r"divide by \[0.7, 1.0, .* left .* row 1"),
    (ops.MultipliesByTheInverse, "divide", "tokens", r"divide by \[0.7\] left"),
]

DIFFERS = r"the output of query \d+ of '.' differs from plain attention by"
ATTENTION = [
    (attention.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (attention.NoDevices, "contract", "contract", "it states no devices; add `devices = "),
    (attention.OneBytePerBlock, "sizes", "sizes", "64 bytes .*, bytes_per_block returned 1 for"),
    (attention.CountsKeysOnly, "sizes", "sizes", "64 bytes .*, bytes_per_block returned 32 for"),
    (attention.Garbage, "sizes", "sizes", "a new cache is not zero"),
    (attention.Transposed, "causal", "result", r"attend returned torch.float32 \[1, .*, q is"),
    (attention.Double, "causal", "result", r"attend returned torch.float64 .*, q is torch.float32"),
    (attention.Reversed, "causal", "causal", "the output is the rows of the step in reverse"),
    (attention.NotCausal, "causal", "causal", "the result with later tokens too"),
    (attention.SeesNothingAhead, "sees_ahead", "sees", "result for tokens that see no later ones"),
    (attention.MovesWindow, "sees_ahead", "sees", "the result for windows that begin later"),
    (attention.IgnoresScale, "causal", "causal", "the result with the scale of head_size"),
    (attention.ReversedHeads, "causal", "causal", "the output is the heads in reverse order"),
    (attention.TilesHeads, "heads", "heads", "query head i with key head i % num_kv_heads, not"),
    (
        attention.LimitedByTheFirst,
        "arguments",
        "arguments",
        r"sequence \d with .* differs by .* from the same alone",
    ),
    (
        attention.LimitedWithoutArguments,
        "arguments",
        "arguments",
        "a step without arguments differs by",
    ),
    (attention.FirstHeadOnly, "heads", "heads", DIFFERS),
    (attention.IgnoresWindow, "window", "window", "the result for an unlimited window"),
    (attention.WiderWindow, "window", "window", "the result for a window of one more than"),
    (attention.IgnoresSoftcap, "softcap", "softcap", "the result of scores without the"),
    (attention.CapsBeforeScaling, "softcap", "softcap", "the result of a soft cap on"),
    (attention.ClampsScores, "softcap", "softcap", DIFFERS),
    (attention.IgnoresSinks, "sinks", "sinks", "the result without the sinks"),
    (attention.ScalesSinks, "sinks", "sinks", "the result with sinks that are scaled as"),
    (attention.CopiesSinks, "sinks", "sinks", DIFFERS),
    (attention.FirstElements, "values", "values", DIFFERS),
    (attention.WholeHeads, "values", "result", r"\[\d+, \d+, 8\] .* with value_size .*, 6\]"),
    (attention.WritesNothing, "cache", "cache", DIFFERS),
    (attention.StepOnly, "cache", "cache", "the result for this step's tokens alone"),
    (attention.ReadsByPosition, "sequences", "sequences", DIFFERS),
    (attention.FirstBlockOnwards, "blocks", "blocks", DIFFERS),
    (attention.ReadsWholeBlocks, "blocks", "blocks", DIFFERS),
    (attention.MixesSequences, "sequences", "sequences", DIFFERS),
    (attention.TableOfTheFirst, "sequences", "sequences|exceptions", f"{DIFFERS}|IndexError"),
    (attention.RotatesQueriesOnly, "rotates", "rotates", DIFFERS),
    (attention.RotatesPairs, "rotates", "rotates", DIFFERS),
    (attention.WritesPadding, "pads", "padding", DIFFERS),
    (attention.PlansLengths, "pads", "padding", DIFFERS),
    (attention.ReadsBounds, "pads", "padding", DIFFERS),
    (attention.KeepsTheLastPlan, "groups", "groups", DIFFERS),
    (attention.CachesTheMask, "layers", "layers", "the result for"),
    (attention.InFloat8, "dtypes", "layers", DIFFERS),
    (attention.ScalesTokens, "codes", "codes", "the result for one scale for all heads of a token"),
    (attention.OwnUncoded, "codes", "codes", "for codes of earlier steps, and for|without codes"),
    (attention.KeepsScales, "coded_steps", "coded steps", DIFFERS),
    (attention.ScalesOfValues, "codes", "codes", "the result for keys with the scales of values"),
    (attention.OwnUncoded, "rows", "rows", "differs by .* from the same row alone; at most"),
    (attention.ViewsOfKeys, "block_views", "block views", "per block in all, bytes_per_block ret"),
    (attention.CopiesTheBlocks, "block_views", "block views", r"\d+ bytes .* views, 0 are in the"),
    (attention.ViewsByToken, "block_views", "block views", r"uint8 \[96, \d+\] of a cache of 24"),
    (attention.ViewsInItsDtype, "block_views", "block views", "view torch.float32 .* torch.uint8"),
    (attention.KeysTwice, "block_views", "block views", r"\d+ bytes of the cache are in several"),
    (attention.OneView, "block_views", "block views", "returned one tensor, expected a sequence"),
    (attention.MarksBlocks, "block_views", "moved blocks", DIFFERS),
    (attention.ScalesInPlace, "reads_only", "reads only", "after attend q had changed"),
    (attention.RotatesKeys, "reads_only", "reads only", "after attend k had changed"),
    (attention.Hoards, "memory", "memory", r"grew from \d+ to \d+ elements in 50 steps"),
]  # fmt: skip

MODELS = [
    (models.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (models.ShapesAsList, "weights", "weights", r"weight_shapes returned \['embed.weight'"),
    (models.ListsTooFew, "weights", "weights", "each weight of .* once, raised KeyError: 'head.we"),
    (models.ListsTooMany, "weights", "weights", "lists 'pooler.weight', but another tensor of th"),
    (models.WrongShape, "weights", "weights", r"RuntimeError: shape '\[24, 24\]' is invalid"),
    (models.ForgetsAWeight, "weights", "weights", "lists '1.out.weight', but another tensor of th"),
    (models.TakesTheFirst, "weights", "weights", "took 6 of 7 weights of weight_shapes"),
    (models.ByOrder, "weights", "weights", "given in reverse order, make other hidden states"),
    (models.KeepsTooFew, "packed", "packed", "a model that load_packed has loaded gives other res"),
    (models.FillsUp, "packed", "packed", "load_packed raised nothing without '"),
    (models.KeepsAList, "packed", "packed", r"packed_weights returned \["),
    (models.SpecsAfterLoading, "kv_specs", "specs", r"returned \[\], .* loaded \[KVSpec"),
    (models.OtherSpecs, "kv_specs", "attend", r"k = .* \[3, 2, 6\] .*, expected .* \[3, 4, 6\]"),
    (models.SkipsALayer, "kv_specs", "attend", "for no layer 1, kv_specs has 2 layers"),
    (models.AttendsTwice, "kv_specs", "attend", "called attend for layer 0 twice"),
    (models.BeyondTheLayers, "kv_specs", "attend", "attend for layer 2, kv_specs has 2 layers"),
    (models.NarrowLogits, "shapes", "shapes", r"returned .* \[1, 100\] .*, expected \[1, 257\]"),
    (models.WholeLogits, "shapes", "shapes", "compute_logits returned torch.int64"),
    (models.NanLogits, "shapes", "shapes", "with 257 numbers that are not finite"),
    (models.WidthOfTheBatch, "shapes", "shapes", r"\[4, 28\] .*, expected \[4, 25\]"),
    (models.AlwaysFloat32, "dtypes", "attend", "q = torch.float32 .*, expected torch.bfloat16"),
    (models.NormalisesLogits, "logits", "logits", r"the logits of rows \[5\] alone differ"),
    (models.NormalisesTheBatch, "batch", "batch", "hidden states of sequence '.' differ from its"),
    (models.OwnPositions, "batch", "batch", "hidden states of sequence '.' differ from its"),
    (models.IgnoresPositions, "positions", "positions", r"\[0, 3, 11, 20\] have the same hidden"),
    (models.OwnPositions, "positions", "positions", r"\[0, 3, 11, 20\] have the same hidden"),
    (models.ShortTable, "length", "length", "at position 63 of max_model_len 64, forward raised"),
    (models.CountsSteps, "state", "state", "the same step, after other ones, gave other hidden"),
    (models.KeepsHidden, "state", "state", r"the model's attributes grew by \d+ elements in 9 ste"),
    (models.ShiftsPositions, "reads_only", "reads only", "after the step positions had changed"),
    (state_models.LeaksBetweenRows, "batch", "batch", "hidden states of sequence '.' differ from"),
    (state_models.BeginsAnew, "batch", "batch", "hidden states of sequence '.' differ from its"),
    (state_models.KeepsItInTheModel, "state", "state", "the same step, after other ones, gave"),
    (state_models.ReturnsHalf, "kv_specs", "recur", r"state torch.float16 \[1, 24\], expected"),
    (state_models.RecursTwice, "kv_specs", "recur", "recur for layer 0, expected each of the 1"),
    (state_models.ForgetsToRecur, "kv_specs", "recur", "for no layer 0, state_specs has 1 layers"),
    (state_models.NamesADevice, "kv_specs", "states", "expected a list with a tuple of TensorSpec"),
    (state_models.StatesAfterLoading, "kv_specs", "states", r"returned \[\], .* loaded \[\(Tensor"),
    (models.ScalesHidden, "reads_only", "reads only", "after the step hidden had changed"),
]  # fmt: skip

SHARED = [
    (shared_models.NoAllReduce, "tensor_2", "shared", "the hidden states of rank 0 of stage 0 dif"),
    (shared_models.OtherColumns, "tensor_2", "shared", "parallel.tensor = 2, the hidden states of"),
    (shared_models.OneRankWaits, "tensor_2", "shared", "rank of stage 0 raised .*: the ranks make"),
    (shared_models.PartOfTheLogits, "tensor_2", "shared", r"are .* \[3, 129\] .* \[3, 257\], as"),
    (shared_models.FirstRowsOnly, "tensor_3", "cuts", "no rank needs 8:24 of dimension 0 of '0."),
    (shared_models.NeedsAll, "tensor_3", "cuts", "of 3, needs 100% of .* at most 58%"),
    (shared_models.CopiesAttention, "tensor_2", "shared specs", "has KVSpec.num_heads=6, .* one"),
    (shared_models.ShapesOfTheCut, "tensor_2", "cuts", r"as \(12[89], 24\), the .*\(257, 24\)"),
    (shared_models.CutsUnknown, "tensor_2", "cuts", "of 'model.embed.weight', expected a Cut insi"),
    (shared_models.RefusesWithoutWords, "tensor_3", "refused", "ModelError: it cannot be done"),
    (shared_models.ForgetsTheStage, "pipeline", "cuts", "rank 0 of stage 0 needs tensors of all s"),
    (shared_models.EmbedsAgain, "pipeline", "shared", "pipeline = 2, the hidden states of rank 0"),
    (shared_models.NumbersOfTheWhole, "pipeline", "attend", "for layer 1, kv_specs has 1 layers"),
    (shared_models.WrongHiddenSize, "pipeline", "hidden_size", r"\[27, 24\], hidden_size is 6"),
    (shared_models.ForgetsTheHead, "pipeline", "cuts", "no rank needs 'head.weight', which the"),
    (shared_models.SumsStages, "tensor_and_pipeline", "shared", "hidden states of rank 0 of stage"),
    (shared_models.PassesZerosOn, "tensor_and_pipeline", "shared", "1 of stage 0 .* of rank 0 of"),
    (shared_models.ExpertsWithoutSum, "expert", "shared", "2, parallel.expert = true, the hidden"),
    (shared_models.FirstExpertsOnly, "expert", "cuts", "no rank needs '0.experts.3.weight', which"),
]  # fmt: skip

# The suite is ModelSuite, the model one of images.
OF_IMAGES = [
    (
        media_models.FormatAsMapping,
        "media",
        "media format",
        r"returned \{'num_tokens': 3\}, exp",
    ),
    (media_models.TokenBeyond, "media", "media format", r"has the token 257, .* in 0..256"),
    (media_models.NoTokens, "media", "media format", "num_tokens is 0, expected a number"),
    (media_models.OneTokenForAll, "media", "media format", "token_id is 3, which is also"),
    (media_models.SeesItself, "media", "media format", "set `sees_ahead = True` in the model"),
    (media_models.NoSettings, "media", "media format", "settings is '', expected a text of all"),
    (media_models.OtherSettings, "media", "media format", "settings is 'squares .', and of a sec"),
    (media_models.NoProgram, "media", "media format", "processor is '', expected the path of"),
    (media_models.GivesText, "media", "process", "processor failed: TypeError: expected bytes"),
    (media_models.KeepsSizes, "media", "process", "processor made 3 bytes of it, expected 48, ui"),
    (media_models.AddsNoise, "media", "process", "made other numbers of it when it was asked ag"),
    (media_models.NamedAlike, "media", "identifiers", "images of 1 x 1 and 40 x 3 have the id"),
    (media_models.NamedAnew, "media", "identifiers", "returned '.*', and of an equal image '"),
    (media_models.Stacks, "media", "encode", r"of 4 items returned torch.float32 \[4, 3, 24\]"),
    (media_models.OneRowEach, "media", "encode", r"\[1, 24\] on cpu for an item, expected \[3, 24"),
    (media_models.MeanOfAll, "media", "encode", "embeddings of item . alone differ from its em"),
    (media_models.ScalesItems, "media", "encode", "changed the numbers that it was given"),
    (media_models.SeesNothing, "media", "encode", "embeddings of two different images are equal"),
    (media_models.Overflows, "media", "encode", "returned numbers that are not finite"),
    (media_models.EncodeRaises, "media", "encode", "raised KeyError: 'image'"),
    (media_models.IgnoresHook, "media", "embedded", "hidden states differ from the hidden states"),
    (media_models.CallsNoHook, "media", "embedded", "called hooks.embedded 0 times in a step"),
]

LOADERS = [
    (loaders.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (loaders.ClaimsFolders, "recognises", "recognises", "True for an empty folder, expected Fa"),
    (loaders.ClaimsNothing, "recognises", "recognises", "False for the checkpoint, expected True"),
    (loaders.RecognisesByListing, "recognises", "recognises", "FileNotFoundError for a path that"),
    (loaders.RecognisesOnce, "recognises", "recognises", "False for the checkpoint, expected True"),
    (loaders.NoVocabulary, "config", "exceptions", "TypeError: .* argument: 'vocab_size'"),
    (loaders.EmptyVocabulary, "config", "config", "vocab_size is None, expected a whole number"),
    (loaders.EosBeyond, "config", "config", r"eos_token_ids is \(6,\), expected a tuple of"),
    (loaders.TorchDtype, "config", "config", "dtype is torch.float32, expected None or one of flo"),
    (loaders.TensorsInHf, "config", "config", "hf is .*, expected a mapping of plain data"),
    (loaders.UnknownSampling, "config", "config", "default_sampling is .*, expected fields of Sam"),
    (loaders.OtherConfigLater, "config", "config", r"config\(\) was .*=8.*, later .*=16"),
    (loaders.Dictionary, "config", "config", "config returned {'vocab': 6.*, no ModelConfig"),
    (loaders.Transposed, "weights", "weights", r"'embed.weight' as \[2, 6\], the checkpoint has"),
    (loaders.MissesNorms, "weights", "weights", "yielded 2 weights, but not norm.weight"),
    (loaders.Twice, "weights", "weights", "yielded 'embed.weight' twice"),
    (loaders.OneBuffer, "weights", "weights", "'embed.weight' with values that differ"),
    (loaders.Rounded, "weights", "weights", "'norm.weight' with values that differ .* 0.5, toler"),
    (loaders.Arrays, "weights", "weights", r"yielded \('embed.weight', array"),
    (loaders.Bytes, "weights", "weights", r"yielded \('embed.weight', a torch.uint8 tensor"),
    (loaders.CutsRowsOnly, "cuts", "cuts", r"with Cut\(dim=1.* as \[1, 2\], exp"),
    (loaders.CutsFromTheStart, "cuts", "cuts", "with other values than the same part of"),
    (loaders.CutsOnlyWhatIsCut, "cuts", "cuts", "cut_weights did not yield norm.weight"),
    (loaders.CutsAnyShape, "cuts", "cuts", r"'embed.weight' of shape \[7, 2\] was asked for; the"),
    (loaders.NamesNoScheme, "weights", "weights", "'head.weight' in 'absent', which is no scheme"),
    (loaders.HalvesInHalf, "weights", "weights", "'head.weight' with values that differ"),
    (loaders.FormatsOfAll, "formats", "formats", "formats has WeightFormat.* for 'absent.w"),
    (loaders.FormatsAreTensors, "formats", "formats", "for 'head.weight', which comes in 'halves'"),
    (loaders.FormatsAreNames, "formats", "formats", "formats has 'float32' for 'embed.weight'"),
    (loaders.NeedsAll, "parts", "exceptions", "KeyError: 'absent.weight'"),
    (loaders.OnlyOnce, "repeated", "repeated", "a second call of weights gave 'embed.weight' oth"),
    (loaders.Noise, "repeated", "repeated", "a second call of weights gave 'embed.weight' otherw"),
    (loaders.NameAsFingerprint, "fingerprint", "fingerprint", "were written again, it is still"),
    (loaders.OwnFingerprint, "fingerprint", "fingerprint", "it was '.*', of a new instance '"),
    (loaders.NumberAsFingerprint, "fingerprint", "fingerprint", r"fingerprint returned \d+"),
    (loaders.HashOfThePath, "content_hash", "content hash", "of a copy in another folder '.*tiny"),
    (loaders.HashOfTheSize, "content_hash", "content hash", "byte of tiny.json was changed"),
    (loaders.HashOfTheName, "content_hash", "content hash", "byte of tiny.json was changed"),
    (loaders.HashIsBytes, "content_hash", "content hash", "content_hash returned b'.*, expected a"),
    (loaders.HashIsEmpty, "content_hash", "content hash", "content_hash returned '', expected a"),
    (loaders.HashOfTheInstance, "content_hash", "content hash", "it was '.*', of a new instance '"),
    (loaders.RawErrors, "damage", "damage", "with tiny.json empty, it raised JSONDecodeError"),
    (loaders.FillsUp, "damage", "damage", "with tiny.json empty, weights yielded 'embed.weight'"),
    (loaders.CachesByClass, "changed_bits", "changed bits", r"tiny.json was flipped at each of "),
    (loaders.CachesByPath, "changed_bits", "changed bits", r"tiny.json was flipped at each of \d+"),
    (loaders.CachesByClass, "second_checkpoint", "second", "another path, gave the weights of tmp"),
    (loaders.Shares, "second_checkpoint", "second", "one of the first checkpoint gave other weigh"),
    (loaders.IgnoresTags, "tags", "tags", r"begins with b'.*' instead of b'{\"vo', and config\(\)"),
    (loaders.ChangesShapes, "reads_only", "reads only", r"weights\(\) changed shapes in place"),
    (loaders.Leaks, "resources", "resources", r"bytes of .* \(allocated in line \d+ of"),
    (loaders.KeepsFilesOpen, "resources", "resources", r"there are \d+ more open files and pipes"),
    (loaders.LeavesThread, "close", "close", "still are: thread 'reader'; expected none"),
    (loaders.Sleeps, "speed", "waits", r"config\(\) waited 0.3 s without computing, expected at m"),
    (loaders.Slow, "speed", "speed", r"99th percentile .* is \d+ microseconds, expected at most b"),
    (loaders.WritesAnIndex, "reads_only", "reads only", "these files had changed: tiny.index"),
]  # fmt: skip

ADAPTED = [
    (models.ForgetsToCall, "adapters", "adapters", "never called hooks.linear with '1.out'"),
    (models.DropsTheChange, "adapters", "adapters", "hidden states differ by .* of the largest"),
    (models.CallsWithOtherNames, "adapters", "adapters", "hidden states differ by .* of the lar"),
    (models.NamesWithoutLayers, "adapters", "adapters", "got 'qkv' with .* no entry of hooks.mat"),
    (
        models.NamesOtherShapes,
        "adapters",
        "adapters",
        r"'1.qkv.weight' \[24, 24\], and weight_shap",
    ),
]

SKIPPING = [
    (models.SkipsTheOthers, "skips", "skips", r"states of tokens that skip layers \[0\] differ by"),
    (models.SkipsKeys, "skips", "skips", r"states of tokens that skip layers \[0\] differ by"),
    (models.SkipsTheNorm, "skips", "skips", "states of a batch with num_layers=1 differ by"),
]  # fmt: skip

QUANTIZED = [
    (models.NamesUnknownMatrices, "quantized", "quantized", "has 'absent.weight', which is not th"),
    (models.ForgetsToLoadQuantized, "quantized", "weights", "NotImplementedError: .* no load_"),
    (models.ReadsCodesAlone, "quantized", "weights", "AttributeError: 'AffineCodes' object has no"),
    (models.LoadsHalvesUpsideDown, "quantized", "quantized", "with codes, hidden states or logits"),
]  # fmt: skip

LIMITED = {loaders.Sleeps: {"max_wait_seconds": 0.1}, loaders.Slow: {"budget_us_per_call": 1.0}}


def nightly(*values):
    """Return parameters that do not always run."""
    return pytest.param(*values, marks=pytest.mark.nightly)


DRAWN_WINDOWS = {"arguments": st.builds(dict, window=st.integers(1, 8))}
RIGHT = [
    (WeightLoaderSuite, {"loader": loaders.Json}),
    (WeightLoaderSuite, {"loader": loaders.CutsByItself}),
    (WeightLoaderSuite, {"loader": loaders.Quantized, "scheme": loaders.scheme}),
    (WeightLoaderSuite, {"loader": loaders.Hashed}),
    (WeightLoaderSuite, {"loader": loaders.Dated}),
    (ModelSuite, {"model": models.Tiny}),
    nightly(ModelSuite, {"model": models.Quantizable}),
    nightly(ModelSuite, {"model": models.Adaptable}),
    (ModelSuite, {"model": models.Skipping}),
    nightly(ModelSuite, {"model": media_models.Seeing}),
    nightly(AttentionBackendSuite, {"backend": attention.KeysAlone}),
    nightly(AttentionBackendSuite, {"backend": attention.Limited, **DRAWN_WINDOWS}),
    nightly(AttentionBackendSuite, {"backend": attention.Viewed}),
    nightly(AttentionBackendSuite, {"backend": attention.Padded}),
    nightly(AttentionBackendSuite, {"backend": attention.Coded}),
    nightly(AttentionBackendSuite, {"backend": attention.RowByRow, "batch_invariant": True}),
    nightly(OpsSuite, {"ops": ops.Plain}),
    nightly(OpsSuite, {"ops": ops.Kept}),
    (OpsSuite, {"ops": ops.Codes, "sizes": (50,), "rows": (3,), "vocab_sizes": (999,)}),
    (SamplerSuite, {"sampler": samplers.Gumbel}),
    (SamplerSuite, {"sampler": samplers.Alternating}),
]


@each_broken(SAMPLERS)
def test_a_broken_sampler_fails_its_rule(cls, test, rule, pattern):
    assert_fails(SamplerSuite, {"sampler": cls}, test, rule, pattern)


@each_broken(ATTENTION)
def test_a_broken_attention_backend_fails_its_rule(cls, test, rule, pattern):
    assert_fails(AttentionBackendSuite, {"backend": cls, **DRAWN_WINDOWS}, test, rule, pattern)


def test_a_suite_of_an_attention_backend_with_arguments_draws_some():
    pattern = "the suite has no `arguments`, a strategy that draws some"
    assert_fails(
        AttentionBackendSuite, {"backend": attention.Limited}, "arguments", "arguments", pattern
    )


@pytest.mark.nightly
@pytest.mark.parametrize("cls", CODES, ids=label)
def test_a_mistake_in_codes_fails_the_rules_of_codes_alone(cls):
    failed = set(messages_of(AttentionBackendSuite, {"backend": cls, "examples": 0.3}))
    expected = {"codes", "coded_steps"} if cls is not attention.KeepsScales else {"coded_steps"}
    if cls is attention.OwnUncoded:
        expected.add("rows")
    assert failed - {"block_views"} == expected


@pytest.mark.parametrize(
    "cls", [attention.SplitsByRows, nightly(attention.OwnUnrounded)], ids=label
)
def test_rows_are_compared_bit_for_bit_where_that_is_claimed(cls):
    assert messages_of(AttentionBackendSuite, {"backend": cls, "examples": 0.05}) == {}
    attributes = {"backend": cls, "batch_invariant": True}
    pattern = r"row \d+ of \d+ .* differs by .* from the same row alone; at most 0 is accepted"
    assert_fails(AttentionBackendSuite, attributes, "rows", "rows", pattern)


@each_broken(OPS)
def test_broken_operations_fail_their_rule(cls, test, rule, pattern):
    assert_fails(OpsSuite, {"ops": cls}, test, rule, pattern)


def test_bits_that_depend_on_the_number_of_rows_fail_what_states_batch_invariance():
    attributes = {"ops": ops.AddsLoraByTheNumberOfRows, "dtypes": [torch.bfloat16]}
    assert message_of(OpsSuite, attributes, "lora_rows") is None
    attributes["batch_invariant"] = True
    assert_fails(OpsSuite, attributes, "lora_rows", "rows", "add_lora of row 0 alone differs by")


@each_broken(MODELS + ADAPTED + SKIPPING + QUANTIZED + OF_IMAGES)
def test_a_broken_model_fails_its_rule(cls, test, rule, pattern):
    attributes = {"model": cls, "config": models.CONFIG}
    assert_fails(ModelSuite, attributes, test, rule, pattern)


@each_broken(SHARED)
def test_a_broken_model_of_several_ranks_fails_its_rule(cls, test, rule, pattern):
    attributes = {"model": cls, "config": shared_models.CONFIG}
    assert_fails(ModelSuite, attributes, test, rule, pattern)


@pytest.mark.parametrize(
    "test", ["tensor_2", "tensor_3", "pipeline", "tensor_and_pipeline", "expert"]
)
def test_the_right_models_of_several_ranks_are_not_skipped(test):
    attributes = {"model": shared_models.SharedExperts, "config": shared_models.CONFIG}
    suite = type("TestComponent", (ModelSuite,), attributes)()
    getattr(suite, f"test_{test}")()


def test_what_a_model_refuses_is_skipped_with_its_message():
    attributes = {"model": shared_models.InPairs, "config": shared_models.CONFIG}
    suite = type("TestComponent", (ModelSuite,), attributes)()
    message = "parallel.tensor: 4 groups cannot be divided among 3 ranks; 1, 2, 4 would do"
    with pytest.raises(pytest.skip.Exception, match=f"refuses parallel.tensor = 3: {message}"):
        suite.test_tensor_3()
    with pytest.raises(pytest.skip.Exception, match="`parallelism` does not have 'expert'"):
        suite.test_expert()


@each_broken(LOADERS)
def test_a_broken_loader_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.2})
    attributes = {"loader": cls, "write": staticmethod(loaders.write), "scheme": loaders.scheme}
    attributes |= LIMITED.get(cls, {})
    assert_fails(WeightLoaderSuite, attributes, test, rule, pattern)


def test_a_loader_without_a_checkpoint_fails():
    message = message_of(WeightLoaderSuite, {"loader": loaders.Json}, "weights")
    assert "observed: TestComponent does not override write()" in message


@pytest.mark.parametrize(("suite", "attributes"), RIGHT, ids=label)
def test_correct_components_pass(suite, attributes):
    defaults = {"config": models.CONFIG, "write": staticmethod(loaders.write), "examples": 0.1}
    assert messages_of(suite, defaults | attributes) == {}


@pytest.mark.parametrize(
    ("suite", "broken_ones"),
    [
        (SamplerSuite, SAMPLERS),
        (AttentionBackendSuite, ATTENTION),
        (OpsSuite, OPS),
        (ModelSuite, MODELS + SHARED + ADAPTED + SKIPPING + QUANTIZED + OF_IMAGES),
        (WeightLoaderSuite, LOADERS),
    ],
)
def test_every_test_catches_a_component(suite, broken_ones):
    assert {test for _, test, _, _ in broken_ones} - GENERAL == suite_tests(suite)
