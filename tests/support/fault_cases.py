"""Requests to the plugins of `support.plugins.faulty`, and the message of each fault."""

from __future__ import annotations

from hardpoint import RequestOutputKind, SamplingParams

DENSE_MESSAGES = {
    "raise": "its apply failed: RuntimeError: broken apply",
    "nan": "its apply failed: it made logits NaN",
    "one nan": "its apply failed: it made logits NaN",
    "spill": "its apply failed: it made logits NaN",
    "inf": "its apply failed: it made logits infinite",
    "nothing": "its apply failed: it left no token to choose",
    "none": "its apply failed: TypeError: expected a tensor, got NoneType",
    "rows": "its apply failed: ValueError: expected logits of shape torch.Size([1, 257])",
    "columns": "its apply failed: ValueError: expected logits of shape torch.Size([1, 257])",
    "dtype": "its apply failed: ValueError: expected logits of dtype torch.float32",
    "device": "its apply failed: ValueError: expected logits of device cpu, got meta",
    "start": "its start failed: RuntimeError: broken start",
}
LAYOUT_MESSAGES = {
    "sparse": "its apply failed: ValueError: expected logits of layout torch.strided",
    "smaller": "its apply failed: ValueError: it changed the shape, strides of the logits",
    "transposed": "its apply failed: ValueError: it changed the shape, strides of the logits",
    "set": "its apply failed: ValueError: it changed the memory of the logits that it was given",
}
SPARSE_MESSAGES = {
    "raise": "its edits failed: RuntimeError: broken edits",
    "type": "its edits failed: TypeError: expected Edits or None, got list",
    "vocabulary": "its edits failed: ValueError: edits name tokens outside 0..256",
    "negative": "its edits failed: ValueError: edits name tokens outside 0..256",
    "rows": "its edits failed: ValueError: edits name rows outside 0..0",
    "lengths": "its edits failed: ValueError: edits have 1 rows but 2 tokens",
    "values": "its edits failed: ValueError: edits have 1 tokens but 0 values",
    "infinite": "its edits failed: it made logits infinite",
    "op": "its edits failed: TypeError: edits have op='keep_only', expected one of Op.ADD, Op.SET",
    "advance": "its advance failed: RuntimeError: broken advance",
}


def jobs(count=32, guilty=(), using=(), name="dense", how="raise"):
    """`count` requests; `using` have the plugin, `guilty` have wrong arguments."""
    result = []
    for index in range(count):
        args = {}
        if index in using or index in guilty:
            args = {name: {"how": how if index in guilty else ""}}
        fields = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
        params = SamplingParams(
            max_tokens=12,
            ignore_eos=True,
            plugin_args=args,
            logprobs=1 if index % 5 == 0 else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **fields,
        )
        result.append((f"r{index}", [index + 1] * (index + 1), params))
    return result


def run_all(engine, work):
    """Run, and keep every final output."""
    finals = {}
    for job in work:
        engine.add_request(*job)
    while engine.has_unfinished_requests():
        for output in engine.step():
            finals[output.request_id] = output
    return finals
