"""Tables and lines fit a terminal, and are complete in a file."""

import re
from pathlib import Path

import onnx_ir as ir
import pytest
import transformer

from onnxpar.cli import main
from onnxpar.cli.screen import Column, Content, Screen, fit, once
from onnxpar.cli.wrap import indented, shortened, shortened_names, wrapped
from tests.tiers import covering

COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
LAYERS = 6
REPORTS = (
    "inspect out",
    "inspect out --layers --collectives",
    "inspect out --node /layer*/attn/*",
    "inspect gpt.onnx",
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a transformer of several layers, and its directory on an unnamed mesh."""
    folder = tmp_path_factory.mktemp("gpt")
    ir.save(transformer.build(layers=LAYERS, d_model=16, heads=2, vocab=32), folder / "gpt.onnx")
    arguments = ["shard", str(folder / "gpt.onnx"), "--strategy", "dp=2,tp=2"]
    assert main([*arguments, "-o", str(folder / "out")]) == 0
    return folder


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *, colour: bool = True) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(
    ("arguments", "width", "colour"),
    covering(REPORTS, [80, 120], [True, False]),
)
def test_reports_fit_a_terminal(
    sharded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int,
    colour: bool,
    arguments: str,
) -> None:
    monkeypatch.chdir(sharded)
    on_a_terminal(monkeypatch, width, colour=colour)
    assert main(arguments.split()) == 0
    text = capsys.readouterr().out
    shown = COLOURS.sub("", text)
    assert ("\x1b[33mtp" in text) == (colour and "out" in arguments)
    # Sentences that are not wrapped by us are wrapped by the terminal.
    rows = [line for line in shown.splitlines() if "  " in line.strip()]
    assert rows and max(map(len, rows)) <= width
    # Repeated layers are shown once.
    assert "/layer*/" in shown and "/layer3/" not in shown
    assert re.search(rf"^ *{LAYERS} ", shown, re.MULTILINE)


def test_a_file_has_everything_and_no_colours(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sharded)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", "out", "--node", "*"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "…" not in text
    assert "local shape" in text and "/layer*/ln1/LayerNormalization_output_0" in text


def test_columns_are_shrunk_in_order() -> None:
    columns = [Column("a", Content.NAME), Column("b", Content.NUMBER), Column("c"),
               Column("d", optional=True)]  # fmt: skip
    natural = [40, 10, 50, 12]
    assert fit(columns, natural, 200) == natural
    # First the sentence is wrapped, then names are shortened, then a column is left out.
    assert fit(columns, natural, 100) == [40, 10, 32, 12]
    assert fit(columns, natural, 82) == [34, 10, 20, 12]
    assert fit(columns, natural, 70) == [36, 10, 20, 0]
    assert fit(columns, natural, 40) == [16, 10, 10, 0]


def test_names_are_shortened_in_the_middle() -> None:
    assert shortened("/layer0/attn/q_proj/MatMul", 26) == "/layer0/attn/q_proj/MatMul"
    short = shortened("/layer0/attn/q_proj/MatMul", 16)
    assert short == "/layer…oj/MatMul" and len(short) == 16


def test_different_names_stay_different() -> None:
    names = [
        "/transformer/h.*/mlp/c_fc/Reshape/grad/Reshape.out",
        "/transformer/h.*/attn/c_attn/Reshape/grad/Reshape.out",
        "/lm_head/MatMul",
    ]
    assert shortened(names[0], 26) == shortened(names[1], 26)
    short = shortened_names(names, 26)
    assert short[0].startswith("…mlp/c_fc") and short[1].startswith("…attn/c_attn")
    assert short[2] == names[2] and max(map(len, short)) <= 26
    # A name that occurs twice stays the same twice.
    assert len(set(shortened_names(names[:1] * 2, 26))) == 1


def test_modules_are_named_once() -> None:
    names = [
        "/model/h.*/ln/Add", "/model/h.*/ln/Mul", "/model/h.*/attn/MatMul", "/model/norm/Mul",
        "/model/h.*/mlp/Gemm", "Where",
    ]  # fmt: skip
    assert indented(names) == [
        ("/model/h.*", "  ln/Add"), ("/model/h.*", "  ln/Mul"), ("/model/h.*", "  attn/MatMul"),
        ("", "/model/norm/Mul"), ("", "/model/h.*/mlp/Gemm"), ("", "Where"),
    ]  # fmt: skip


def test_a_narrow_terminal_shows_nodes_below_their_modules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 40, colour=False)
    rows = [
        (f"/transformer/h.*/self_attention/{name}", "[dp, ~]") for name in ("Add", "Mul", "Sub")
    ]
    columns = [Column("node", Content.NODE), Column("layout")]
    Screen().table(columns, rows)
    lines = COLOURS.sub("", capsys.readouterr().out).splitlines()
    assert [line.split() for line in lines if line] == [
        ["node", "layout"], ["/transformer/h.*"], ["self_attention/Add", "[dp,", "~]"],
        ["self_attention/Mul", "[dp,", "~]"], ["self_attention/Sub", "[dp,", "~]"],
    ]  # fmt: skip
    on_a_terminal(monkeypatch, 80, colour=False)
    Screen().table(columns, rows)
    assert "/transformer/h.*/self_attention/Add  [dp, ~]" in COLOURS.sub(
        "", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("split over [dp, ~, (batch: tp)]", 22, ["split over", "[dp, ~, (batch: tp)]"]),
        # A list that is wider than a line is broken, but not the list within it.
        ("[dp, (seq: tp), (head: tp)]", 16, ["[dp, (seq: tp),", "(head: tp)]"]),
        ("3596*seq*((batch + 1)//2)", 20, ["3596*seq*", "((batch + 1)//2)"]),
        ("8*(batch + 1) + 2*batch", 14, ["8*(batch + 1)", "+ 2*batch"]),
        ("3596*seq*((batch + 1)//2)", 11, ["3596*seq*", "((batch +", "1)//2)"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("a bb ccc", 4, ["a bb", "ccc"]),
        ("", 4, [""]),
    ],
    ids=str,
)
def test_brackets_are_kept_together(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width) == lines
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_cells_are_broken_behind_commas_and_before_arrows() -> None:
    text = "a=batch, M=seq, K=128 sum, N=512"
    assert wrapped(text, 21) == ["a=batch, M=seq, K=128", "sum, N=512"]
    assert wrapped(text, 21, cell=True) == ["a=batch, M=seq,", "K=128 sum, N=512"]
    assert wrapped("a b c d, . -> a b 1 1", 19, cell=True) == ["a b c d, .", "-> a b 1 1"]
    # Not if the line would be short.
    assert wrapped("[], partial sum over dp", 20, cell=True) == ["[], partial sum over", "dp"]


def test_repeated_sentences_are_said_once() -> None:
    assert once(["a", "b", "a"]) == ["a (×2)", "b"]


def test_layouts_have_the_colours_of_their_axes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 80)
    screen = Screen({"axes": {"dp": 2, "tp": 2}})
    styles = [
        [(str(s.style), text.plain[s.start : s.end]) for s in text.spans]
        for text in (
            screen.layout("[dp, ~, tp]"), screen.layout("/dp/tp.weight"), screen.layout("[2@4]")
        )
    ]  # fmt: skip
    assert styles == [[("cyan", "dp"), ("yellow", "tp")], [], [("cyan", "2@4")]]
    screen.legend()
    assert "over 2 devices that are 4 ranks apart" in capsys.readouterr().out


def test_no_name_in_a_sentence_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 40, colour=False)
    name, formula = "/layer*/ln1/LayerNormalization", "3596*seq*((batch + 1)//2)"
    rows = [("AllReduce", f"{name} operand 0"), ("AllReduce", formula)]
    Screen().table([Column("collective", Content.NUMBER), Column("for")], rows)
    lines = COLOURS.sub("", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines[1:3]] == [
        ["AllReduce", shortened(name, 28)], ["operand", "0"]
    ]  # fmt: skip
    assert "".join(line.replace("AllReduce", "") for line in lines[3:]).split() == formula.split()
