"""Step parts with a worker half that verifies drafts with one mistake each."""

from __future__ import annotations

from .step_parts import GoodWorkerHalf, part_of_worker


class _VerifierHalf(GoodWorkerHalf):
    """Samples the rows of each request in turn, and accepts correct drafts."""

    def verify_drafts(self, step):
        return [self.accepted(step, index) for index in range(len(step.requests))]

    def accepted(self, step, index):
        drafts, count = step.drafts[index], 0
        while step.sample([(index, count)]) == list(drafts[count : count + 1]):
            count += 1
        return count


class _AcceptsAllHalf(_VerifierHalf):
    def accepted(self, step, index):
        super().accepted(step, index)
        return len(step.drafts[index])


class _SkipsLastRowHalf(_VerifierHalf):
    def accepted(self, step, index):
        drafts = step.drafts[index]
        for count, token in enumerate(drafts):
            if step.sample([(index, count)]) != [token]:
                return count
        return len(drafts)


class _SamplesNothingHalf(_VerifierHalf):
    def accepted(self, step, index):
        return 0


class _NumbersByIdHalf(_VerifierHalf):
    def verify_drafts(self, step):
        return {request.request_id: 0 for request in step.requests}


class _RowTooManyHalf(_VerifierHalf):
    def accepted(self, step, index):
        step.sample([(index, len(step.drafts[index]) + 1)])
        return 0


Verifier = part_of_worker(_VerifierHalf)
AcceptsAll = part_of_worker(_AcceptsAllHalf)
SkipsLastRow = part_of_worker(_SkipsLastRowHalf)
SamplesNothing = part_of_worker(_SamplesNothingHalf)
NumbersById = part_of_worker(_NumbersByIdHalf)
RowTooMany = part_of_worker(_RowTooManyHalf)
