"""An interrupt while the command line is imported prints no traceback."""

import subprocess
import sys

CODE = """
import runpy, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "hardpoint.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
runpy.run_module("hardpoint", run_name="__main__")
"""


def test_an_interrupt_of_the_first_imports_ends_quietly():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
