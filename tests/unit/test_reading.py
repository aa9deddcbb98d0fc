"""Chat templates that do not end."""

from __future__ import annotations

import sys

import pytest

from folders import byte_tokenizer
from outpace import reading
from outpace.core import OutpaceError

TURN = [{"role": "user", "content": "a b"}]
LOOPS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% for a in range(9) %}{{ m(n - 1) }}{% endfor %}{% endmacro %}{{ m(99) }}",
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "messages": "{% for a in messages[0].content * 99 %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_does_not_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LINES", 10_000)
    tokenizer, before = byte_tokenizer(), sys.gettrace()
    tokenizer.chat_template = template
    with pytest.raises(OutpaceError, match=r"the chat template of m failed: ") as error:
        reading.render(tokenizer, "m", TURN)
    assert "\n" not in str(error.value) and sys.gettrace() is before


def test_a_long_conversation_is_rendered_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert reading.render(tokenizer, "m", TURN * 5000) == "user: a b\n" * 5000
