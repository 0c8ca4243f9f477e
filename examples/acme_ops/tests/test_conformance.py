"""The operations give the results of the formulas: the conformance kit compares them."""

import torch
from acme_ops import OneCall

from hardpoint.testing import OpsSuite

pytest_plugins = ["hardpoint.testing"]


class TestOneCall(OpsSuite):
    ops = OneCall
    dtypes = (torch.bfloat16,)
    sizes = (2, 50)
