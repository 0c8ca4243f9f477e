"""Weight loaders with one mistake each, and a right one, of a format of one JSON file."""

from __future__ import annotations

import itertools
import json

import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins import (
    ModelConfig,
    ModelError,
    Quantization,
    QuantizationContext,
    WeightLoader,
)
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.parallel import Cut, needed_part
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight
from support.samples import Sample, leave_file, leave_thread, spend

TENSORS = {
    "embed.weight": torch.arange(12.0).view(6, 2),
    "norm.weight": torch.tensor([1.0, 0.5]),
    "head.weight": torch.arange(12.0).view(6, 2) / 4,
}


def write(folder):
    """Write a checkpoint; return its path and tensors."""
    weights = {name: tensor.tolist() for name, tensor in TENSORS.items()}
    (folder / "tiny.json").write_text(json.dumps({"vocab": 6, "weights": weights}))
    return folder, TENSORS


def scheme(_suite, name, _config):
    """Return the scheme of a name, for a suite."""
    if name != "halves":
        raise PluginNotFoundError(f"no quantizations component is called {name!r}")
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    return Halves(QuantizationContext(name=name, options=Halves.Options(), **place))


class Json(Sample, WeightLoader, contract=1):
    """Right."""

    @classmethod
    def recognises(cls, files):
        return (files.path / "tiny.json").is_file()

    def config(self):
        vocab_size = self.read()["vocab"]
        return ModelConfig(
            architecture="Tiny", hf={}, vocab_size=vocab_size, max_position_embeddings=8
        )

    def weights(self, shapes):
        for name, values in self.read()["weights"].items():
            if name in shapes:
                yield name, torch.tensor(values)

    def read(self):
        path = self.context.files.path / "tiny.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as cause:
            raise ModelError(f"{path.name} is damaged: {cause}") from cause


class Quantized(Json):
    """Right: one weight has few bits."""

    def weights(self, shapes):
        for name, tensor in super().weights(shapes):
            yield name, self.stored(tensor) if name == "head.weight" else tensor

    def stored(self, tensor, scheme="halves"):
        return QuantizedWeight(scheme, tuple(tensor.shape), {"halves": (tensor * 4).to(torch.int8)})

    def formats(self, shapes):
        return {
            name: WeightFormat("halves", 12, is_quantized=True)
            if name == "head.weight"
            else WeightFormat("float32", 4 * tensor.numel())
            for name, tensor in TENSORS.items()
            if name in shapes
        }


class Halves(Sample, Quantization, contract=1):
    """Reads the weights of `Quantized`."""

    def read(self, stored):
        codes = stored.tensor("halves", torch.int8, stored.shape)
        scales = torch.full((len(codes), 1), 0.25)
        return AffineCodes(codes, 8, 32, scales)


class NamesNoScheme(Quantized):
    def stored(self, tensor, scheme="absent"):
        return super().stored(tensor, scheme)


class HalvesInHalf(Quantized):
    def stored(self, tensor, scheme="halves"):
        return super().stored(tensor / 2, scheme)


class FormatsOfAll(Quantized):
    def formats(self, shapes):
        missing = shapes.keys() - TENSORS.keys()
        return super().formats(shapes) | {name: WeightFormat("float32", 0) for name in missing}


class FormatsAreTensors(Quantized):
    def formats(self, shapes):
        return {name: WeightFormat("float32", 48) for name in super().formats(shapes)}


class FormatsAreNames(Quantized):
    def formats(self, shapes):
        return dict.fromkeys(TENSORS, "float32")


class CutsByItself(Json):
    """Right: reads no more than it must."""

    def cut_weights(self, shapes, cuts):
        for name, values in self.read()["weights"].items():
            if name in shapes:
                weight = torch.tensor(values)
                cut = needed_part(name, weight.shape, shapes, cuts)
                yield name, weight if cut is None else self.part(weight, cut)

    def part(self, weight, cut):
        return cut.of(weight)


class CutsRowsOnly(CutsByItself):
    def part(self, weight, cut):
        return weight[cut.start : cut.stop]


class CutsFromTheStart(CutsByItself):
    def part(self, weight, cut):
        return Cut(cut.dim, 0, cut.stop - cut.start).of(weight)


class CutsOnlyWhatIsCut(CutsByItself):
    def cut_weights(self, shapes, cuts):
        return ((name, w) for name, w in super().cut_weights(shapes, cuts) if name in cuts)


class CutsAnyShape(Json):
    def cut_weights(self, shapes, cuts):
        for name, weight in self.weights(shapes):
            yield name, cuts[name].of(weight) if name in cuts else weight


class Dated(Json):
    """Right: has a fingerprint."""

    def fingerprint(self):
        return str((self.context.files.path / "tiny.json").stat().st_mtime_ns)


class Hashed(Json):
    """Right, with a hash of its content."""

    def content_hash(self, hash_file):
        return hash_file(self.context.files.path / "tiny.json")


class HashOfThePath(Hashed):
    def content_hash(self, hash_file):
        return f"{self.context.files.path}/tiny.json {super().content_hash(hash_file)}"


class HashOfTheSize(Hashed):
    def content_hash(self, hash_file):
        return str((self.context.files.path / "tiny.json").stat().st_size)


class HashOfTheName(Hashed):
    def content_hash(self, hash_file):
        return "tiny"


class HashIsBytes(Hashed):
    def content_hash(self, hash_file):
        return super().content_hash(hash_file).encode()


class HashIsEmpty(Hashed):
    def content_hash(self, hash_file):
        return ""


class HashOfTheInstance(Hashed):
    def content_hash(self, hash_file):
        return f"{super().content_hash(hash_file)} {id(self)}"


class NameAsFingerprint(Json):
    def fingerprint(self):
        return str(self.context.files.path)


NUMBERS = itertools.count()


class OwnFingerprint(Json):
    def fingerprint(self):
        return str(next(NUMBERS))


class NumberAsFingerprint(Json):
    def fingerprint(self):
        return (self.context.files.path / "tiny.json").stat().st_mtime_ns


class NoContract(Json, contract=None):
    pass


class ClaimsFolders(Json):
    @classmethod
    def recognises(cls, files):
        return files.path.is_dir()


class ClaimsNothing(Json):
    @classmethod
    def recognises(cls, files):
        return files.path.suffix == ".json"


class RecognisesByListing(Json):
    @classmethod
    def recognises(cls, files):
        return any(path.name == "tiny.json" for path in list(files.path.iterdir()))


class RecognisesOnce(Json):
    known = False

    @classmethod
    def recognises(cls, files):
        cls.known, before = True, cls.known
        return super().recognises(files) and not before


class NoVocabulary(Json):
    def config(self):
        return ModelConfig(architecture="Tiny", hf={}, max_position_embeddings=8)


def with_config(name, **fields):
    """Return a loader with other fields in its configuration."""

    class Loader(Json):
        def config(self):
            defaults = {"architecture": "Tiny", "hf": {}, "vocab_size": 6}
            return ModelConfig(**defaults | {"max_position_embeddings": 8} | fields)

    Loader.__name__ = Loader.__qualname__ = name
    return Loader


EmptyVocabulary = with_config("EmptyVocabulary", vocab_size=None)
EosBeyond = with_config("EosBeyond", eos_token_ids=(6,))
TorchDtype = with_config("TorchDtype", dtype=torch.float32)
TensorsInHf = with_config("TensorsInHf", hf={"scale": torch.ones(1)})
UnknownSampling = with_config("UnknownSampling", default_sampling={"temprature": 1.0})


class OtherConfigLater(Json):
    calls = 0

    def config(self):
        self.calls += 1
        length = 8 * self.calls
        return ModelConfig(architecture="Tiny", hf={}, vocab_size=6, max_position_embeddings=length)


class Dictionary(Json):
    def config(self):
        return self.read()


class Transposed(Json):
    def weights(self, shapes):
        return (
            (name, tensor.permute(*reversed(range(tensor.dim()))))
            for name, tensor in super().weights(shapes)
        )


class MissesNorms(Json):
    def weights(self, shapes):
        return (item for item in super().weights(shapes) if "norm" not in item[0])


class Twice(Json):
    def weights(self, shapes):
        yield from super().weights(shapes)
        yield from super().weights(shapes)


class OneBuffer(Json):
    def weights(self, shapes):
        buffer = torch.empty(12)
        for name, tensor in super().weights(shapes):
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)


class Arrays(Json):
    def weights(self, shapes):
        return ((name, tensor.numpy()) for name, tensor in super().weights(shapes))


class Bytes(Json):
    def weights(self, shapes):
        return ((name, tensor.byte()) for name, tensor in super().weights(shapes))


class Rounded(Json):
    def weights(self, shapes):
        return ((name, tensor.round()) for name, tensor in super().weights(shapes))


class NeedsAll(Json):
    def weights(self, shapes):
        weights = self.read()["weights"]
        return ((name, torch.tensor(weights[name])) for name in shapes)


class OnlyOnce(Json):
    def read(self):
        self.content = getattr(self, "content", None) or super().read()
        return self.content

    def weights(self, shapes):
        weights = self.read()["weights"]
        return ((name, torch.tensor(weights.pop(name))) for name in shapes if name in weights)


class Noise(Json):
    def weights(self, shapes):
        return ((name, torch.rand(tensor.shape)) for name, tensor in super().weights(shapes))


class RawErrors(Json):
    def read(self):
        return json.loads((self.context.files.path / "tiny.json").read_text())


class FillsUp(Json):
    """Invents missing parts of a damaged file."""

    def read(self):
        try:
            return super().read()
        except ModelError:
            weights = {name: torch.zeros(t.shape).tolist() for name, t in TENSORS.items()}
            return {"vocab": 6, "weights": weights}


class WritesAnIndex(Json):
    def config(self):
        (self.context.files.path / "tiny.index").write_text("0")
        return super().config()


class CachesByClass(Json):
    """Caches contents in its class."""

    content = None

    def read(self):
        if CachesByClass.content is None:
            CachesByClass.content = super().read()
        return CachesByClass.content


class CachesByName(Json):
    """Caches contents by the name of the folder, which other folders share."""

    contents = {}

    def read(self):
        path = self.context.files.path
        stamp = (path / "tiny.json").stat()
        key = (path.name[:3], stamp.st_size, stamp.st_mtime_ns)
        if key not in self.contents:
            self.contents[key] = super().read()
        return self.contents[key]


class CachesByPath(Json):
    """Caches contents by its path."""

    contents = {}

    def read(self):
        path = self.context.files.path
        if path not in self.contents:
            self.contents[path] = super().read()
        return self.contents[path]


class Shares(Json):
    """Has the files of the newest instance in its class."""

    newest = None

    def __init__(self, context):
        super().__init__(context)
        Shares.newest = context

    def read(self):
        context, self.context = self.context, Shares.newest
        try:
            return super().read()
        finally:
            self.context = context


class IgnoresTags(Json):
    """Looks for the first brace, whatever the file begins with."""

    def read(self):
        path = self.context.files.path / "tiny.json"
        try:
            text = path.read_bytes().decode(errors="replace")
            return json.loads('{"vocab"' + text.partition('cab"')[2])
        except (OSError, ValueError) as cause:
            raise ModelError(f"{path.name} is damaged: {cause}") from cause


class ChangesShapes(Json):
    def weights(self, shapes):
        yield from list(super().weights(shapes))
        shapes.clear()


class Leaks(Json):
    """Keeps each read."""

    reads = []

    def read(self):
        self.reads.append(super().read())
        return self.reads[-1]


class KeepsFilesOpen(Json):
    def read(self):
        leave_file()
        return super().read()


class LeavesThread(Json):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("reader")


class Sleeps(Json):
    def config(self):
        spend(0.3)
        return super().config()


class Slow(Json):
    def config(self):
        spend(0.001)
        return super().config()
