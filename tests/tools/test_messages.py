"""`tools/messages.py` finds messages, also those that C++ throws."""

import ast

from tests.tiers import FULL
from tools import messages


def test_what_is_thrown_is_read() -> None:
    source = """
void f() {
  if (closed_) throw failure("its world was closed");
  throw std::invalid_argument(std::string(name) + " is \'" + text + "\', expected 0 to " +
                              std::to_string(n - 1));
  throw;
}
"""
    assert list(messages.thrown(source)) == [
        (3, "error", "its world was closed"),
        (4, "error", "{name} is '{text}', expected 0 to {n - 1}"),
    ]


def test_a_semicolon_in_a_message_ends_nothing() -> None:
    found = messages.thrown('throw Error("NVRTC has no " + name + "; install it");')
    assert [text for _, _, text in found] == ["NVRTC has no {name}; install it"]


def test_the_text_of_an_option_is_help() -> None:
    source = """
x: Annotated[int, Option("Number of ranks.", "N")] = 1
raise ValueError(f"expected {x} ranks")
"""
    found = messages._of_python(ast.parse(source))
    assert [(kind, text) for _, kind, text in found] == [
        ("help", "Number of ranks."),
        ("error", "expected {x} ranks"),
    ]


def test_the_repository_has_all_kinds() -> None:
    folders = messages.FOLDERS if FULL else ("onnxpar/cli", "runtime/csrc")
    listed = list(messages.messages(folders))
    assert {message.kind for message in listed} == set(messages.KINDS)
    assert any(message.path.startswith("runtime/csrc") for message in listed)
