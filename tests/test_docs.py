"""The documentation builds without broken links, lists every public name, and shows code that runs."""

import html
import importlib
import inspect
import json
import logging
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import types
import warnings

import keras
import pytest

import documents
import sweeps
import tfshard
from tfshard.devices import startup
from tools.site import doctests, pictures, troubleshooting

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
# Pages with blocks that take ten seconds.
SLOW = {"pipelines", "planning", "recipes"}
# Subpackages that users do not import.
INNER = {"command_line", "_private", "cli", "doctor", "operations", "tables"}


# --- the site ----------------------------------------------------------------------------------------


def build(out: pathlib.Path, config: pathlib.Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess:
    """Build the site without network access: a build that fetched something would fail."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    environment["https_proxy"] = environment["http_proxy"]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--config-file={config}", f"--site-dir={out}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def shown(page: pathlib.Path, site: pathlib.Path) -> pathlib.Path:
    """Return where a page is in the site."""
    return site / page.relative_to(DOCS).with_suffix(".html")


def test_every_page_is_built_and_fetches_nothing(site):
    assert {shown(path, site) for path in PAGES} <= {*site.glob("**/*.html")}
    for path in site.glob("**/*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?://[^"]+)"', path.read_text())
        fetched += re.findall(
            r'<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="(https?://[^"]+)"', path.read_text()
        )
        assert fetched == [], path.name


def test_blocks_tables_and_lists_are_rendered(site):
    """Finds blocks, tables and lists that GitHub renders and Python-Markdown does not."""
    raw = {}
    for path in PAGES:
        text = path.read_text()
        page = shown(path, site).read_text()
        words = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
        words = html.unescape(re.sub(r"<[^>]+>", "", words))
        raw[path.name] = re.findall(r"^.*(?:```|\|---|:::|\*\*).*$|^ *(?:- |\d\. )\S.*", words, re.MULTILINE)
        if page.count("<pre>") < len(re.findall(r"^ *```\w", text, re.MULTILINE)):
            raw[path.name].append("a block")
        if page.count("<table>") < len(re.findall(r"^ *\|(?: *-+ *\|)+$", text, re.MULTILINE)):
            raw[path.name].append("a table")
    assert {name: lines for name, lines in raw.items() if lines} == {}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "link, complaint",
    [("[a](nowhere.md)", "nowhere.md"), ("[a](other.md#no-such-place)", "no-such-place")],
    ids=["page", "anchor"],
)
def test_a_broken_link_is_an_error(tmp_path, link, complaint):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# A\n\n{link}\n")
    (docs / "other.md").write_text("# B\n\n## A place\n")
    # The config of this repository, without the plugins that need the package and the pages.
    config = (ROOT / "mkdocs.yml").read_text().partition("\nplugins:")[0].replace("docs_dir: docs", f"docs_dir: {docs}")
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "out", tmp_path / "mkdocs.yml")
    assert done.returncode != 0 and complaint in done.stdout + done.stderr
    (docs / "index.md").write_text("# A\n\n[a](other.md#a-place)\n")
    done = build(tmp_path / "out", tmp_path / "mkdocs.yml")
    assert done.returncode == 0, done.stdout + done.stderr


# --- the reference -----------------------------------------------------------------------------------


def resolved(name: str) -> object:
    """Return the object with a dotted name."""
    value: object = tfshard
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def public() -> dict[str, object]:
    """Return the public names of tfshard and its subpackages: `__all__`, or a module's functions and classes."""
    found = {f"tfshard.{name}": getattr(tfshard, name) for name in tfshard.__all__}
    for info in pkgutil.iter_modules(tfshard.__path__, "tfshard."):
        wing = info.name.rpartition(".")[2]
        if wing.startswith("_") or wing in INNER:
            continue
        module = importlib.import_module(info.name)
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", None) == info.name and inspect.isroutine(v)
        ]
        own += [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == info.name]
        for name in getattr(module, "__all__", [each for each in own if not each.startswith("_")]):
            found[f"{info.name}.{name}"] = getattr(module, name)
    return found


PUBLIC = public()


def documented() -> set[int]:
    """Return the ids of all objects that reference.md names, including the objects in the modules it names."""
    found = set()
    for name in re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE):
        value = resolved(name)
        found |= {id(value)}
        if isinstance(value, types.ModuleType):
            found |= {id(each) for each in vars(value).values() if getattr(each, "__module__", None) == value.__name__}
    return found


def test_every_public_name_is_in_the_reference():
    assert len(PUBLIC) > 80, "the wings were found"
    modules = {f"## {name}" for name, value in PUBLIC.items() if isinstance(value, types.ModuleType)}
    assert modules <= set((DOCS / "reference.md").read_text().splitlines())
    shown = documented()
    values = {name: value for name, value in PUBLIC.items() if not isinstance(value, types.ModuleType)}
    assert [name for name, value in values.items() if id(value) not in shown] == []


def members(value: object) -> list[str]:
    """Return the methods and properties that a public class defines."""
    own = vars(value).items() if inspect.isclass(value) else []
    return [name for name, each in own if not name.startswith("_") and (callable(each) or isinstance(each, property))]


def test_every_public_name_has_a_docstring():
    """Includes methods and properties."""
    without = [name for name, value in PUBLIC.items() if not inspect.getdoc(value)]
    for name, value in PUBLIC.items():
        without += [f"{name}.{each}" for each in members(value) if not inspect.getdoc(getattr(value, each))]
    assert without == []


def test_examples_of_docstrings_are_blocks(site):
    text = doctests.fenced("Adds.\n\nExample:\n\n>>> 1 + 1\n2\n\nMore.")
    assert text == "Adds.\n\n**Example**\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    page = html.unescape(re.sub(r"<(pre)\b.*?</\1>", "", (site / "reference.html").read_text(), flags=re.DOTALL))
    assert ">>>" not in page


# --- blocks of code --------------------------------------------------------------------------------------


def run(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Run the blocks of a page as one program. The file keeps the page's lines, because TensorFlow reads sources."""
    file = folder / f"{path.stem}.py"
    file.write_text(documents.program(path.read_text()))
    with warnings.catch_warnings():
        # Keras's warnings: layers that it does not quantize, `shuffle` of a dataset.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"keras\.")
        runpy.run_path(str(file), run_name=path.stem)


@pytest.fixture
def same_process():
    """Undo the process-wide changes of a block."""
    policy, logger = keras.mixed_precision.dtype_policy(), logging.getLogger("tfshard")
    level, runtime = logger.level, startup.current()
    yield
    startup._runtime = runtime
    keras.mixed_precision.set_dtype_policy(policy)
    logger.setLevel(level)


def test_every_block_of_python_runs(subtests, tmp_path, monkeypatch, same_process):
    """Runs each page in one namespace and an empty folder. An ordinary run takes one of the slow pages."""
    pages = [path for path in documents.PAGES if documents.python_blocks(path.read_text())]
    assert len(pages) >= 15
    quick = [path for path in pages if path.stem not in SLOW]
    for path in sweeps.taken("pages", pages, always=quick, sample=1):
        folder = tmp_path / path.stem
        folder.mkdir()
        monkeypatch.chdir(folder)
        with subtests.test(path.name):
            run(path, folder)


def test_few_blocks_are_not_run(subtests):
    """The end of a run lists the blocks and the reasons as skipped tests."""
    left_out = {
        f"{path.name}:{block.line}": block.reason
        for path in documents.PAGES
        for block in documents.python_blocks(path.read_text())
        if block.reason
    }
    assert len(left_out) <= 5
    for block, reason in left_out.items():
        with subtests.test(block):
            pytest.skip(f"{block} is not run: {reason}")


def test_python_is_in_blocks_that_run():
    """An indented block would be shown but not run."""
    python = re.compile(r"(?:import|from|with|for) \w|\w+ = \w+[.(]")
    indented = {
        path.name: [line for line in documents.plain_lines(path.read_text()) if python.match(line)]
        for path in documents.PAGES
    }
    assert {name: lines for name, lines in indented.items() if lines} == {}


def test_every_command_has_its_program_and_flags():
    wrong, seen = [], 0
    for path in documents.PAGES:
        for name, flags in documents.commands(path.read_text()):
            seen += 1
            known = documents.flags_of(name)
            if known is None:
                wrong.append(f"{path.name}: there is no {name}")
                continue
            given = {flag[2:].partition("=")[0] for flag in flags}
            wrong += [f"{path.name}: {name} has no --{flag}" for flag in given if {flag, flag[2:]}.isdisjoint(known)]
    assert seen > 100
    assert wrong == []


@pytest.mark.parametrize(
    "line, name, flags",
    [
        ("    tools/test.sh --quick", "tools/test.sh", ["--quick"]),
        ("`sudo tools/hosts.sh --rate=1gbit\nexamples/train_lm.py --mesh=batch:4`", "tools/hosts.sh", ["--rate=1gbit"]),
        ("    TFSHARD_SWEEP=1 python -m tools.faults --runs=5  # five", "tools.faults", ["--runs=5"]),
        ("    tfshard plan models.py:build --mesh=batch:8", "tfshard plan", ["--mesh=batch:8"]),
    ],
    ids=["script", "program", "module", "command"],
)
def test_commands_are_found(line, name, flags):
    assert documents.commands(line)[0] == (name, flags)
    assert {flag[2:].partition("=")[0] for flag in flags} <= documents.flags_of(name)
    assert "no_such_flag" not in documents.flags_of(name)
    assert documents.flags_of("tools/no_such_program.py") is None


# --- pages that programs write -----------------------------------------------------------------------------


def test_every_error_is_explained_by_an_example():
    classes = {cls.__name__ for cls in troubleshooting.classes()}
    assert len(classes) > 15
    assert {example.error for example in troubleshooting.EXAMPLES} == classes - {"ShardingError"}
    assert len({example.title for example in troubleshooting.EXAMPLES}) == len(troubleshooting.EXAMPLES)


def test_errors_say_what_the_page_says(same_process):
    """`python -m tools.site.troubleshooting --write` writes the page. The sweep runs the launched example."""
    page = troubleshooting.PAGE.read_text()
    messages = {}
    for example in troubleshooting.EXAMPLES:
        if example.launched and not sweeps.SWEEP:
            messages[example.title] = page.partition(f"### {example.title}\n")[2].split("```")[3][5:-1]
        else:
            messages[example.title] = troubleshooting.shown(example)
    assert troubleshooting.page(messages) == page


def test_a_picture_of_measurements_has_their_numbers():
    saved, scaled = pictures.measured()
    assert saved.bars["MirroredStrategy"][0] > 4 * saved.bars["stage 3"][0] > 0 and len(scaled.bars) == 4
    drawn = (DOCS / "saved.svg").read_text()
    assert drawn == pictures.svg(saved, scaled, height=300), "python -m tools.site.pictures --write"
    assert f">{saved.bars['stage 3'][0]:.1f}<" in drawn
    assert (DOCS / "step.svg").read_text() == pictures.step_flow(), "likewise"


@pytest.mark.slow
def test_pictures_are_as_they_are_drawn():
    assert {name: (DOCS / name).read_text() == text for name, text in pictures.pictures().items()} == {
        "stages_rest.svg": True,
        "stages_peak.svg": True,
        "saved.svg": True,
        "step.svg": True,
    }


# --- the front page and the notebooks ----------------------------------------------------------------


def test_the_readme_is_short_and_has_a_picture():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "](docs/saved.svg)" in text


def test_every_claim_of_the_readme_has_its_proof():
    """Building the site checks the links of the page."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "claims.md").read_text(), re.MULTILINE)[1:]
    assert len(rows) > 25
    assert [claim for claim, _ in rows if claim not in readme] == []
    assert [claim for claim, proof in rows if "](" not in proof and "`" not in proof] == []
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", " ".join(proof for _, proof in rows))
    assert len(tests) > 20
    assert [name for file, name in tests if f"def {name}(" not in (ROOT / file).read_text()] == []
    measured = readme.partition("## Measured")[2].partition("## More")[0]
    table = re.findall(r"\| ([^|]+) \| `[^`]+` \| [^|]+ \|", measured)
    assert len(table) > 5
    assert [row for row in table if not any(claim in row for claim, _ in rows)] == []


def test_links_of_the_front_pages_are_not_broken(site):
    """Building the site checks the links in docs/."""
    broken, seen = [], 0
    for name in ("README.md", "CONTRIBUTING.md"):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", (ROOT / name).read_text()):
            seen += 1
            page = ROOT / target
            if not page.exists() or (anchor and f'id="{anchor}"' not in shown(page, site).read_text()):
                broken.append(f"{name}: {target}#{anchor}")
    assert seen > 20
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch, same_process):
    """Runs the code cells one after the other in one process."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "kept without results"
    file = tmp_path / f"{path.stem}.py"
    file.write_text("\n".join(code))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"keras\.")
        runpy.run_path(str(file), run_name=path.stem)


def test_each_row_of_the_comparison_has_its_source():
    rows = re.findall(r"^\| [^|]+\|.*\|$", (DOCS / "comparison.md").read_text(), re.MULTILINE)
    rows = [row for row in rows if not row.startswith(("| library ", "| | "))]
    assert len(rows) > 12
    assert [row for row in rows if "](" not in row and "sources above" not in row] == []
