"""The parser gives the same events however its output is cut: the conformance kit checks it."""

from acme_parsing import Scratchpad

from hardpoint.testing import OutputParserSuite, OutputSample

pytest_plugins = ["hardpoint.testing"]


class TestScratchpad(OutputParserSuite):
    parser = Scratchpad
    samples = [
        OutputSample("<pad>Which zone?</pad>Soon.", reasoning="Which zone?", content="Soon."),
        OutputSample("UTC.</pad>Soon.", reasoning="UTC.", content="Soon.", reasoning_open=True),
        OutputSample('>> now{"zone": "UTC"}\n', calls=[("now", {"zone": "UTC"})]),
        OutputSample(
            '<pad>>> no call</pad>One moment.>> now{}\n>> sun{"at": [1, 2]}\n',
            reasoning=">> no call",
            content="One moment.",
            calls=[("now", {}), ("sun", {"at": [1, 2]})],
        ),
        OutputSample("a > b <pa", content="a > b <pa"),
    ]
