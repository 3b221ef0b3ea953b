"""What a script's exit says."""

import pytest

from kimi_mini.cli import UserError, run


def outcome(action, capsys):
    def main(_):
        return action()

    with pytest.raises(SystemExit) as end:
        run(main)
    return end.value.code, capsys.readouterr().err


def raising(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize("code, expected", [(None, 0), (0, 0), (1, 1)])
def test_the_code_of_main_is_the_exit_code(code, expected, capsys):
    assert outcome(lambda: code, capsys) == (expected, "")


@pytest.mark.parametrize("error", [UserError("no\n  such thing"), OSError("no such thing")])
def test_a_users_mistake_is_one_line_and_exit_code_2(error, capsys):
    assert outcome(raising(error), capsys) == (2, "error: no such thing\n")


def test_ctrl_c_is_not_an_error_of_ours(capsys):
    assert outcome(raising(KeyboardInterrupt()), capsys)[0] == 130


def test_our_own_faults_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 / 0)
