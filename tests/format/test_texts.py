"""Messages stay readable whatever the length of the names in them."""

from onnxpar_format.texts import message_text


def test_long_words_and_long_messages_are_shortened() -> None:
    word = "a" * 299
    assert message_text(f"{word}: expected 3, got 4") == f"{word}: expected 3, got 4"
    message = message_text(f"symbol '{'x' * 200_000}': expected 3, got {'9' * 5000}")
    assert message == (
        f"symbol '{'x' * 99}…(199803 characters)…{'x' * 98}': expected 3, got "
        f"{'9' * 100}…(4800 characters)…{'9' * 100}"
    )
    message = message_text("word " * 1000)
    assert len(message) < 4100 and message.endswith("… (1000 more characters)")


def test_a_message_does_not_control_the_terminal() -> None:
    assert message_text("'a\x1b[31m\x9b': no\n\tsuch") == "'a\\x1b[31m\\x9b': no\n\tsuch"
