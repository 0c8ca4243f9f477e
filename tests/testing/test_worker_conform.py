"""Every built-in sampler passes the public conformance kit."""

from __future__ import annotations

from support.searching import kit_examples

from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.testing import SamplerSuite

pytest_plugins = ["hardpoint.testing"]


class TestDefaultSampler(SamplerSuite):
    examples = kit_examples()
    sampler = DefaultSampler
