"""`hardpoint pull`, `models list` and `models rm`, with a hub on this machine."""

import json
import os
import subprocess
import sys

import pytest
from support.local_hub import local_hub

from hardpoint.cli import main
from hardpoint.errors import ModelError
from hardpoint.toolkit.hub import HubName, hub_name, quantization_of, select_files

MODELS = {
    "acme/plain": {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "model.safetensors": b"weights" * 1000,
        "pytorch_model.bin": b"a pickle",
    },
    "acme/tiny-GGUF": {
        "README.md": b"about",
        "tiny-Q4_K_M.gguf": b"GGUF four" * 1000,
        "Tiny.q8_0.gguf": b"GGUF eight" * 1000,
        "BF16/tiny-BF16-00001-of-00002.gguf": b"GGUF first" * 1000,
        "BF16/tiny-BF16-00002-of-00002.gguf": b"GGUF second" * 1000,
    },
    "acme/images-GGUF": {
        "mmproj-images-Q8_0.gguf": b"GGUF projector" * 1000,
        "images-Q8_0.gguf": b"GGUF model" * 1000,
        "images-UD-Q8_0.gguf": b"GGUF dynamic" * 1000,
        "images-UD-Q4_K_XL.gguf": b"GGUF dynamic" * 1000,
    },
}


@pytest.fixture(scope="module")
def hub():
    with local_hub(MODELS) as hub:
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    hub.sent.clear()
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(*arguments):
        program = "import sys; from hardpoint.cli import main\n"
        program += "for line in sys.argv[1:]: print('rc', main(line.split()), flush=True)"
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_pull_list_and_remove(run, hub):
    done = run(
        "pull acme/tiny-GGUF:q4_k_m",
        "pull acme/plain",
        "pull acme/tiny-GGUF:BF16",
        "pull acme/tiny-GGUF:Q4_K_M",
        "models list",
        "models rm acme/tiny-GGUF:BF16",
        "models list --json",
        "models rm acme/plain",
        "models rm acme/tiny-GGUF",
        "models list",
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("rc")] == ["rc 0"] * 10, done
    assert lines[0].endswith("/tiny-Q4_K_M.gguf")
    assert lines[2].endswith("/snapshots/" + "a" * 40)
    assert lines[4].endswith("/BF16/tiny-BF16-00001-of-00002.gguf")
    assert lines[6] == lines[0]
    assert sorted(hub.sent) == [
        "BF16/tiny-BF16-00001-of-00002.gguf",
        "BF16/tiny-BF16-00002-of-00002.gguf",
        "config.json",
        "model.safetensors",
        "tiny-Q4_K_M.gguf",  # once
    ]
    assert "acme/tiny-GGUF:BF16: 2 files, 21 KiB" in done.stderr
    assert "Run it: hardpoint chat --model acme/plain" in done.stderr
    header = next(index for index, line in enumerate(lines) if line.startswith("NAME "))
    table = lines[header + 1 : lines.index("rc 0", header)]
    assert [row.split()[0] for row in table] == [
        "acme/plain",
        "acme/tiny-GGUF:BF16",
        "acme/tiny-GGUF:Q4_K_M",
    ]
    assert "Removed acme/tiny-GGUF:BF16, 21 KiB." in lines
    start = lines.index("[")
    found = json.loads("\n".join(lines[start : lines.index("]") + 1]))
    assert [model["name"] for model in found] == ["acme/plain", "acme/tiny-GGUF:Q4_K_M"]
    assert lines[-2] == "No model is in the cache; hardpoint pull OWNER/NAME downloads one."


def test_a_projector_is_no_model(run, hub, tmp_path):
    done = run("pull acme/images-GGUF:Q8_0")
    assert done.stdout.split()[0].endswith("/images-Q8_0.gguf"), done
    assert hub.sent == ["images-Q8_0.gguf"]
    projector = next(tmp_path.rglob("images-Q8_0.gguf")).with_name("mmproj-images-Q8_0.gguf")
    projector.write_bytes(b"GGUF")  # as other programs download it
    done = run("pull acme/images-GGUF:Q8_0 -q", "models list", "models rm acme/images-GGUF:Q8_0")
    assert done.stdout.split()[0].endswith("/images-Q8_0.gguf"), done
    row = next(line for line in done.stdout.splitlines() if "images-GGUF:Q8_0" in line)
    assert row.endswith("/images-Q8_0.gguf")
    assert "/mmproj" not in row
    assert projector.exists()


def test_a_dynamic_quantization_has_a_name_of_its_own(run, hub):
    done = run("pull acme/images-GGUF:Q8_0", "generate x --model acme/images-GGUF:Q4_K_XL")
    assert done.stdout.split()[0].endswith("/images-Q8_0.gguf"), done
    assert "no GGUF file of the quantization Q4_K_XL" in done.stderr
    assert hub.sent == ["images-Q8_0.gguf"]
    done = run("pull acme/images-GGUF:ud-q4_k_xl")
    assert done.stdout.split()[0].endswith("/images-UD-Q4_K_XL.gguf"), done
    assert hub.sent[1:] == ["images-UD-Q4_K_XL.gguf"]


def test_a_pull_that_failed_goes_on(run, hub):
    hub.cut.add("model.safetensors")
    done = run("pull acme/plain", "pull acme/plain -q", "pull acme/plain -q")
    codes = [line for line in done.stdout.splitlines() if line.startswith("rc")]
    assert codes[-2:] == ["rc 0", "rc 0"]
    assert hub.sent.count("config.json") == 1


def test_a_wrong_checksum(run, hub, tmp_path):
    content = MODELS["acme/plain"]["model.safetensors"]
    hub.stated["model.safetensors"] = b"x" * len(content)
    try:
        done = run("pull acme/plain")
    finally:
        hub.stated.clear()
    assert "rc 2" in done.stdout
    assert "model.safetensors: expected the SHA-256" in done.stderr
    assert not list(tmp_path.rglob("model.safetensors"))


def test_errors(run):
    done = run(
        "pull acme/none",
        "pull acme/tiny-GGUF",
        "pull acme/tiny-GGUF:Q5_K_M",
        "models rm acme/plian",
        "generate x --model acme/tiny-GGUF:Q6_K",
    )
    assert done.stdout.split() == ["rc", "2"] * 5
    none, several, other, absent, running = (
        line for line in done.stderr.splitlines() if line.startswith("hardpoint: error: ")
    )
    assert "acme/none: the Hugging Face hub did not describe it: " in none
    assert (
        "acme/tiny-GGUF: it has GGUF files alone; add a quantization, as in acme/tiny-GGUF:BF16 "
        "(found: BF16, Q4_K_M, Q8_0)" in several
    )
    assert "there is no GGUF file of the quantization Q5_K_M; found: BF16, Q4_K_M, Q8_0" in other
    assert "acme/plian is not in the cache" in absent
    assert "acme/tiny-GGUF:Q6_K" in running


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("a/b.c-d:Q4_K_M", HubName("a/b.c-d", "Q4_K_M")),
        ("a/b.gguf", None),
        ("a", None),
        ("a/b/c", None),
        ("./a", None),
        ("a/b:", None),
    ],
)
def test_names(text, name):
    assert hub_name(text) == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM2.q8_0.gguf", "Q8_0"),
        ("x/y-IQ2_XXS-00001-of-00003.gguf", "IQ2_XXS"),
        ("Qwen3-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-f16.gguf", "F16"),
        ("BF16.gguf", "BF16"),
        ("mmproj.gguf", None),
        ("mmproj-pixtral-12b-Q8_0.gguf", None),
        ("Pixtral-mmproj-f16.gguf", None),
    ],
)
def test_quantizations(file, name):
    assert quantization_of(file) == name


def test_a_repository_without_weights():
    with pytest.raises(
        ModelError, match="a/b: expected .safetensors or .gguf files, found neither"
    ):
        select_files(HubName("a/b"), ["pytorch_model.bin", "config.json"])


def test_a_malformed_name(capsys):
    assert main(["pull", "smollm2"]) == 2
    assert "expected OWNER/NAME or OWNER/NAME:QUANT, got 'smollm2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            (
                "HF_ENDPOINT",
                url,
                f"HF_ENDPOINT: expected a URL such as https://huggingface.co, got {url!r}",
            )
            for url in ("http://hub:abc", "http://[::1", "hub")
        ),
        *(
            ("HF_TOKEN", token, "HF_TOKEN: expected a token of visible ASCII characters, got one")
            for token in ("hf_sec\x0bret", "hf_s\u00e9cret")
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [["pull", "acme/none"], ["models", "list"], ["generate", "x", "--model", "acme/no"]]
)
def test_malformed_settings(monkeypatch, tmp_path, capsys, command, name, value, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    assert main(["-q", *command]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hardpoint: error: {message}")
    assert name == "HF_ENDPOINT" or value not in err
