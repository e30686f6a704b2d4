import logging

from pibroch.cli import console


def test_control_characters_of_names_do_not_reach_a_terminal(capsys):
    console.say("column `\x1b]0;owned\x07`")
    assert capsys.readouterr().err == "column `\\x1b]0;owned\\x07`\n"
    record = logging.LogRecord("pibroch", logging.INFO, "", 0, "a\x1b[2J\n\tb", (), None)
    assert console._EscapingFormatter("%(message)s").format(record) == "a\\x1b[2J\n\tb"
