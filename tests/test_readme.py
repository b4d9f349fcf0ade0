# SPDX-License-Identifier: Apache-2.0
"""README.md, and CARD.md as kernel-builder fills it: their Python runs as it stands, what they name exists."""

import ast
import inspect
import re
import tomllib

import jinja2  # comes with torch; the card is a template of minijinja, which is nearly the same language
import pytest

from .conftest import ROOT

PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
API_ROW = re.compile(r"^\| `(\w+)\(([^)]*)\)` \|", re.MULTILINE)
MAKE_COMMAND = re.compile(r"(?:^ +|`)(?:\w+=\S+ )?make ([\w-]+)", re.MULTILINE)


def document(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name != "CARD.md":
        return text
    config = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    layers = ast.parse((ROOT / "torch-ext/gated_deltanet/layers.py").read_text(encoding="utf-8")).body
    return jinja2.Template(text, undefined=jinja2.StrictUndefined, trim_blocks=True).render(
        repo_id=config["hub"]["repo-id"],
        version=config["version"],
        license=config["license"].lower(),
        functions=public_functions(),
        layers=[node.name for node in layers if isinstance(node, ast.ClassDef)],
        has_benchmark=(ROOT / "benchmarks" / "benchmark.py").exists(),
        source=config.get("source"),
    )


def public_functions():
    tree = ast.parse((ROOT / "torch-ext/gated_deltanet/__init__.py").read_text(encoding="utf-8"))
    return [name for name in ast.literal_eval(tree.body[-1].value) if name != "layers"]


def run_blocks(name):
    """Every Python block, in order and in one namespace; tracebacks show the document's lines."""
    text, namespace = document(name), {"__name__": "__readme__"}
    blocks = list(PYTHON_BLOCK.finditer(text))
    assert blocks, f"control: {name} has Python"
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(ROOT / name), "exec"), namespace)
    return namespace


def modules_of_the_layers(model):
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    return [layer.forward.__func__.__module__ for layer in layers]


def test_python_of_the_readme(kernel, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = run_blocks("README.md")
    assert set(modules_of_the_layers(names["model"])) == {kernel.layers.__name__}
    assert capsys.readouterr().out.startswith("It was impossible for ")


def test_python_of_the_card(kernel, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(ROOT)
    names = run_blocks("CARD.md")
    assert names["o"].shape == names["v"].shape and bool(names["state"].any())
    model = names["with_gated_deltanet"](AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "tiny_qwen3_5"))
    assert set(modules_of_the_layers(model)) == {kernel.layers.__name__}


def test_card_lists_functions_and_layers(kernel):
    text = document("CARD.md")
    assert text.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\ntags:\n- kernel\n---\n")
    layers = [
        name
        for name, value in vars(kernel.layers).items()
        if getattr(value, "__module__", "") == kernel.layers.__name__
    ]
    names = [name for name in kernel.__all__ if name != "layers"]
    for listed in (names, layers):
        assert "\n\n" + "".join(f"- `{name}`\n" for name in listed) + "\n" in text


def test_api_table_has_every_function_with_its_arguments(kernel):
    rows = dict(API_ROW.findall(document("README.md")))
    assert list(rows) == [name for name in kernel.__all__ if name != "layers"]
    for name, arguments in rows.items():
        expected = []
        for parameter in inspect.signature(getattr(kernel, name)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in expected:
                expected.append("*")
            expected.append(parameter.name)
        assert arguments.split(", ") == expected, name


def test_error_message_is_the_one_the_readme_shows(kernel):
    import torch

    q, k = torch.zeros(1, 4, 2, 32), torch.zeros(1, 4, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as raised:
        kernel.gated_delta_rule(q, k, q, None, None, kernel.new_state(1, 2, 32, 32, device="cpu"))
    assert f"`{str(raised.value).splitlines()[0]}`" in document("README.md")


@pytest.mark.parametrize("name", ("README.md", "CARD.md"))
def test_what_is_named_exists(name):
    text = document(name)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(MAKE_COMMAND.findall(text)) <= targets
    paths = re.findall(r"[`\"]((?:csrc|torch-ext|tests|benchmarks|examples|tools)/[\w./-]*)[`\"]", text)
    tracked = [path for path in paths if path != "benchmarks/results/"]  # made by `make bench`
    assert [path for path in tracked if not (ROOT / path).exists()] == []
    assert "{{" not in text and "{%" not in text


def test_readme_is_short():
    assert len(document("README.md").splitlines()) < 200
