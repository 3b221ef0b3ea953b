"""What a script's exit says."""

import sys
import warnings

import pytest

from kimi_mini.cli import UserError, run, set_threads


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


def test_a_warning_is_one_line_too(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, err = outcome(lambda: warnings.warn("two\nlines", stacklevel=1), capsys)
    assert (code, err) == (0, "warning: two lines\n")


def test_a_closed_stdout_is_no_fault(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as end:
        run(lambda _: 0)
    assert end.value.code == 0


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_a_number_of_threads_that_cannot_be_is_refused(threads):
    """BR-77."""
    with pytest.raises(UserError, match="--threads must be 1.."):
        set_threads(threads)


def test_our_own_faults_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 / 0)
