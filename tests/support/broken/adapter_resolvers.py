"""Adapter resolvers with one mistake each, and right ones."""

import time
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import AdapterResolver, LoRARequest
from support.samples import Sample, leave_thread, spend

KNOWN = ("sql", "chat.v2")


def provide(suite, folder):
    """Offer the adapters of `KNOWN`."""
    for name in KNOWN:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
    return {"path": str(folder)}


class Table(Sample, AdapterResolver, contract=1):
    """Right: looks names up in a list that was made at the start."""

    class Options(plugins.Options):
        path: str

    def __init__(self, context):
        super().__init__(context)
        self.root = Path(self.options.path)
        self.names = {folder.name: folder for folder in self.root.iterdir()}

    def resolve(self, name):
        return self.names.get(name)


class Requests(Table):
    """Right: gives requests."""

    def resolve(self, name):
        path = super().resolve(name)
        return path and LoRARequest(name=name, id=7, path=str(path))


class NoContract(Table, contract=None):
    pass


class Strings(Table):
    def resolve(self, name):
        path = super().resolve(name)
        return path and str(path)


class Relative(Table):
    def resolve(self, name):
        return super().resolve(name) and Path(name)


class OfAnotherName(Requests):
    def resolve(self, name):
        path = super().resolve(name)
        return path and LoRARequest(name=path.name.upper(), id=7, path=path.path)


class Once(Table):
    def resolve(self, name):
        return self.names.pop(name, None)


class Joins(Table):
    def resolve(self, name):
        try:
            folder = self.root / name
            return folder if (folder / "adapter_config.json").is_file() else None
        except (ValueError, OSError):
            return None


class Flattens(Joins):
    """Leaves separators out, and follows links."""

    def resolve(self, name):
        return None if set(name) & set("/.") and name not in KNOWN else super().resolve(name)


class Demands(Table):
    def resolve(self, name):
        return self.names[name]


class AnyName(Table):
    def resolve(self, name):
        return self.names.get(name) or self.root / "absent"


class Waits(Table):
    def resolve(self, name):
        if name not in self.names:
            time.sleep(0.3)
            spend(0.3)  # by the clock of the rule for speed
        return super().resolve(name)


class RemembersTheLast(Table):
    def resolve(self, name):
        self.last = name
        time.sleep(0.002)
        return self.names.get(self.last)


class Indexes(Table):
    def resolve(self, name):
        (self.root / "index.json").write_text("{}")
        return super().resolve(name)


class Looks(Table):
    """Right: looks for the folder in each call."""

    def resolve(self, name):
        if not name.isascii() or set(name) & set("/\0\n \\%~") or name.startswith((".", "planted")):
            return None
        folder = self.root / name[:200]
        return folder if (folder / "adapter_config.json").is_file() else None


class RemembersUnknown(Looks):
    """Never looks again for a name that was not there, of a bounded number of names."""

    def __init__(self, context):
        super().__init__(context)
        self.unknown = {}

    def resolve(self, name):
        if name in self.unknown:
            return None
        path = super().resolve(name)
        if path is None:
            self.unknown[name] = True
            if len(self.unknown) > 20:
                del self.unknown[next(iter(self.unknown))]
        return path


class RemembersAll(Looks):
    """Keeps every name that is asked for."""

    def __init__(self, context):
        super().__init__(context)
        self.asked = set()

    def resolve(self, name):
        self.asked.add(name)
        return super().resolve(name)


class LeavesThread(Looks):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("watcher")


class Slow(Looks):
    def resolve(self, name):
        spend(0.001)
        return super().resolve(name)
