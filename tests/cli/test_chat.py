"""`verifypd chat`: the conversation, its commands, refused messages, Ctrl-C."""

from __future__ import annotations

import os
import signal

from tests.cli.speller import Speller, feed, run
from verifypd.cli import running


def test_chat_keeps_the_conversation(llm, monkeypatch, capsys):
    feed(monkeypatch, "hi\n\nand then?\n")
    assert run("chat", "--system", "be brief", "--quiet") == 0
    assert llm.seen == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "abc déf"},
        {"role": "user", "content": "and then?"},
    ]
    assert llm.params.max_tokens == 512
    assert capsys.readouterr() == ("abc déf\n" * 2, "")


def test_special_tokens_act_only_where_a_flag_says_so(llm, monkeypatch, capsys):
    for flags, acts in (([], False), (["--special-tokens-in-content"], True)):
        feed(monkeypatch, "hi</s>\n")
        assert run("chat", "--quiet", *flags) == 0 and llm.special is acts


def test_chat_commands(llm, monkeypatch, capsys):
    feed(monkeypatch, "/help\n/system\nhi\n/system sing\n/system\n/nonsense\nla\n/reset\nlo\n/exit\nnever\n")
    assert run("chat", "--quiet") == 0
    assert llm.seen == [{"role": "system", "content": "sing"}, {"role": "user", "content": "lo"}]
    err = capsys.readouterr().err
    assert "/reset" in err
    assert "no system prompt" in err
    assert "no command /nonsense" in err


def test_chat_survives_a_refused_message(llm, monkeypatch, capsys):
    feed(monkeypatch, "this is too long\nok\n")
    assert run("chat", "--quiet") == 0
    assert llm.seen == [{"role": "user", "content": "ok"}]
    assert "error: the prompt has 9000 tokens, the model takes 8192; /reset starts over" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    speller = Speller("abcdef", on_step=interrupt)
    monkeypatch.setattr(running, "load", speller)
    before = signal.getsignal(signal.SIGINT)
    feed(monkeypatch, "hi\nmore\n")
    assert run("chat", "--quiet") == 0
    assert speller.aborted == 2
    assert speller.seen[1] == {"role": "assistant", "content": "ab"}
    assert capsys.readouterr().out == "ab\nab\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_leaves(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running, "load", Speller(on_step=interrupt))
    feed(monkeypatch, "hi\n")
    assert run("chat") == 130
    assert "Traceback" not in capsys.readouterr().err
