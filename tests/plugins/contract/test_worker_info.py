"""Infos of workers of earlier contracts are accepted."""

import dataclasses

from hardpoint.plugins import WorkerInfo
from hardpoint.toolkit.workers.calls import WorkerServer, decode_result, encode_call


class Loading:
    """Returns its info."""

    def __init__(self, info):
        self.info = info

    def load_model(self):
        return self.info


def test_a_worker_that_records_steps_has_another_method_for_idle_time():
    earlier = WorkerInfo(64, 1 << 20, records_decode_steps=True)
    assert earlier == WorkerInfo(64, 1 << 20, idle_method="record_decode_step")
    assert dataclasses.replace(earlier, idle_method=None).idle_method is None
    assert WorkerInfo(64, 1 << 20).idle_method is None


def test_it_is_the_same_on_the_other_side_of_a_connection():
    info = WorkerInfo(64, 1 << 20, idle_method="idle")
    answer = WorkerServer(Loading(info)).run(encode_call("load_model"))
    assert decode_result("load_model", answer, "rank 0") == info
