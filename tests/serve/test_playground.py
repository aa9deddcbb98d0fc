"""The page at ``/``: its files and their headers, and what it shows in a real browser."""

from __future__ import annotations

import json
import queue
import re
import shutil
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from outpace.drafters import DRAFTERS
from outpace.embedded import smollm2_path
from outpace.loading import load
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine
from outpace.serve.listening import listen
from outpace.serve.playground import FILES
from outpace.serve.server import Options, Server
from outpace.serve.service import Service
from serving import model, run, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAFTER = "combined:(lookahead:window=4)+(prompt_lookup)"
STREAM = re.compile("/v1/(chat/)?completions")
REFUSED = re.compile("Failed to load resource: the server responded with a status of 40[01]")  # the browser's


def test_the_files_are_sent_without_a_key_with_their_types_and_a_strict_policy() -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

    async def main() -> None:
        async with serving(keys=("secret",)) as client:
            for path in FILES:
                exchange = client.send(path)
                text, ending = await exchange.text(), "html" if path == "/" else path.rpartition(".")[2]
                assert exchange.status == 200 and text
                assert exchange.headers["content-type"].startswith(kinds.get(ending, "text/plain"))
                assert exchange.headers["x-content-type-options"] == "nosniff"
                policy = dict(
                    part.strip().split(" ", 1)
                    for part in exchange.headers["content-security-policy"].split(";")
                )
                assert policy["default-src"] == "'none'"
                assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}

    run(main)


def test_the_page_names_files_that_there_are_and_has_nothing_inline() -> None:
    page = FILES["/"].content.decode()
    for name in re.findall(r'(?:href|src)="([^"]*)"', page):
        assert f"/{name}" in FILES
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", page)
    module = FILES["/static/playground.js"].content.decode()
    for name in re.findall(r'from "\./([^"]*)"', module):
        assert f"/static/{name}" in FILES
    assert "innerHTML" not in module and "unsafeHTML" not in module
    licences = FILES["/static/vendor/LICENSES.txt"].content.decode()
    for path in FILES:
        if path.startswith("/static/vendor/") and path.endswith(".js"):
            assert re.search(rf"package {path.rpartition('/')[2][:-3]}, version \d", licences)


@pytest.mark.real
@pytest.mark.skipif(not smollm2_path().is_dir(), reason="SmolLM2 is not here; make real fetches it")
def test_the_example_of_an_edit_is_mended_and_most_of_it_reused() -> None:
    """The text and the instruction of the page, on a model that follows it."""
    source = FILES["/static/playground.js"].content.decode()
    text, change = re.findall('const (?:EXAMPLE|CHANGE) =\\s+"(.*)";', source)

    async def main() -> None:
        smollm2 = load("smollm2", "bfloat16", "cpu")
        async with serving("suffix:memory=0", loaded=smollm2) as client:
            asked = {
                "messages": [{"role": "user", "content": f"{change}\n\nText: {text}\nCorrected:"}],
                "prediction": {"type": "content", "content": text},
                "max_tokens": 128,
            }
            found = await client.chat(**asked).json()
        mended = text.replace("markte", "market").replace("givs", "gives")
        assert mended != text and found["choices"][0]["message"]["content"].strip() == mended
        usage = found["usage"]
        assert (
            usage["completion_tokens_details"]["accepted_prediction_tokens"]
            > 0.6 * usage["completion_tokens"]
        )

    run(main, 300)


# -- in a browser ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of the embedded model in a thread of this process."""
    started: queue.SimpleQueue[Service] = queue.SimpleQueue()
    listener = listen("127.0.0.1", 0)
    limits = Limits()

    def load() -> tuple[Any, Any]:
        return model(), make_engine(model(), DRAFTER, limits, ready=True, adaptive=False, memory=0.2)

    server = Server(Options(drain=0, limits=limits), load, started.put)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    started.get(timeout=60)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="the browser's tests need playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("the browser's tests need chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The playground; at the end, nothing has left its origin, and nothing was written to the console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    left, said = list[str](), list[str]()
    page.on("request", lambda request: left.append(request.url))
    page.on("console", lambda message: REFUSED.match(message.text) or said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{address}/")
    page.get_by_text("nano", exact=False).first.wait_for()
    yield page
    assert left and all(url.startswith(f"{address}/") for url in left)
    assert said == []
    context.close()


def steps_of(text: str) -> list[dict[str, Any]]:
    """The trace in the body of a stream."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [step for event in events for c in json.loads(event)["choices"] for step in c.get("trace", ())]


def finish(page: Page) -> None:
    """Wait until no request is running."""
    page.locator("button:disabled", has_text="Stop").wait_for()


def spans(page: Page, name: str) -> list[list[Any]]:
    """Number, class and text of each step of a run, as they are shown."""
    found: list[list[Any]] = page.locator(f"#tokens-{name} .step").evaluate_all(
        "found => found.map(one => [Number(one.dataset.step), one.classList[1], one.textContent])"
    )
    return found


def test_a_chat_models_page_opens_in_chat_with_one_line_of_invitation(page: Page) -> None:
    assert page.get_by_role("radio", name="Chat").is_checked()
    for tab in ("Generate", "Race", "Edit"):
        page.get_by_role("tab", name=tab).click()
        page.locator(".answer").get_by_text(f"Press {tab}: ").wait_for()
        assert page.locator(".tokens").count() == page.locator(".figures").count() == 0


def test_a_model_without_a_template_is_asked_to_complete(page: Page) -> None:
    def plain(route: Any) -> None:
        found = route.fetch().json()
        found["data"][0]["chat"] = False
        route.fulfill(json=found)

    page.route("**/v1/models", plain)
    page.reload()
    page.get_by_text("nano", exact=False).first.wait_for()
    assert page.get_by_role("radio", name="Completion").is_checked()


def test_every_drafter_that_needs_nothing_can_be_chosen(page: Page) -> None:
    ready = {name for name, cls in DRAFTERS.items() if not cls.needs} - {"none"}
    box = page.get_by_label("Drafter")
    offered = box.locator("option").all_inner_texts()
    assert offered[0] == "the server's own: combined" and {*offered[1:]} == {"off", *ready}
    box.select_option("lookahead")
    page.get_by_role("spinbutton", name="Tokens").fill("24")
    with page.expect_response(STREAM) as caught:
        page.get_by_role("button", name="Generate").click()
    finish(page)
    steps = steps_of(caught.value.text())
    assert {name for step in steps for name in step["drafters"]} == {"lookahead"}
    page.get_by_text(re.compile("τ is the number of tokens per step")).wait_for()


def test_colours_are_those_of_the_steps_of_the_response(page: Page) -> None:
    page.get_by_role("radio", name="Completion").check()
    page.get_by_label("Text to continue").fill("one two three four. one two three four. one")
    page.get_by_role("spinbutton", name="Tokens").fill("48")
    with page.expect_response(STREAM) as caught:
        page.get_by_role("button", name="Generate").click()
    finish(page)
    steps = steps_of(caught.value.text())
    assert len(steps) > 3 and any(len(step["tokens"]) > 2 for step in steps)
    assert spans(page, "generate") == [[s["step"], f"tint{s['step'] % 3}", s["text"]] for s in steps]
    drafted = page.locator("#tokens-generate .token.drafted").all_text_contents()
    assert drafted == [text for step in steps for text in step["texts"][: len(step["path"])]]
    bars = page.locator("#bars-generate .bar")
    assert bars.count() == len(steps)
    # The tree of the step under the mouse, and the next by keyboard.
    place = next(place for place, step in enumerate(steps) if step["path"])
    page.locator("#tokens-generate .step").nth(place).hover()
    heading = page.get_by_role("heading", name=re.compile(r"Step \d"))
    assert heading.inner_text() == f"Step {place + 1}"
    assert page.locator(".tree .node.rejected").count() == len(steps[place]["tree"]["tokens"]) - len(
        steps[place]["path"]
    )
    shown = page.locator(".tree .node.accepted:not(.root) text").all_text_contents()
    path = steps[place]["texts"][: len(steps[place]["path"])]
    assert shown == [text.replace(" ", "·").replace("\n", "⏎") for text in path]
    page.locator("#tokens-generate").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.get_by_role("heading", name="Step 2", exact=True).wait_for()


@pytest.mark.parametrize(("api", "order"), [("Completion", "together"), ("Chat", "one after the other")])
def test_a_race_ends_identical(page: Page, api: str, order: str) -> None:
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("radio", name=api).check()
    page.get_by_role("radio", name=order).check()
    page.get_by_role("spinbutton", name="Tokens").fill("24")
    page.get_by_role("spinbutton", name="Temperature").fill("0.8")
    page.get_by_role("button", name="Race").click()
    page.locator("#verdict.good").wait_for()
    finish(page)
    plain, drafted = spans(page, "plain"), spans(page, "drafted")
    assert "".join(text for *_, text in plain) == "".join(text for *_, text in drafted)
    assert 3 < len(drafted) < len(plain)
    assert page.locator("#verdict").inner_text().startswith("identical: ")


def test_a_race_shows_where_the_texts_differ(page: Page) -> None:
    """The plain lane is sent with another seed."""

    def other_seed(route: Any) -> None:
        body = route.request.post_data_json
        seed = 7 if body.get("speculation") == "off" else body["seed"]
        route.continue_(post_data=json.dumps({**body, "seed": seed}))

    page.route(STREAM, other_seed)
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("spinbutton", name="Temperature").fill("2")
    page.get_by_role("spinbutton", name="Tokens").fill("12")
    page.get_by_role("button", name="Race").click()
    page.locator("#verdict.error", has_text="they differ from token").wait_for()
    finish(page)
    assert page.locator("#tokens-drafted .differs").count() == 1


def test_an_edit_marks_what_was_reused(page: Page) -> None:
    page.get_by_role("tab", name="Edit").click()
    with page.expect_response(STREAM) as caught:
        page.get_by_role("button", name="Edit").click()
    finish(page)
    steps = steps_of(caught.value.text())
    reused = [
        text
        for step in steps
        for text in step["texts"][: step["drafters"].get("reference", {"accepted": 0})["accepted"]]
        if text != "<|endoftext|>"  # which is no part of the text
    ]
    asked = caught.value.request.post_data_json
    text = asked["prediction"]["content"]
    said = f"Correct the two mistakes; repeat the rest.\n\nText: {text}\nCorrected:"
    assert asked["messages"] == [{"role": "user", "content": said}]
    assert len(reused) > 0.6 * sum(len(step["tokens"]) for step in steps)
    assert page.locator("#tokens-edit .reused").all_text_contents() == reused


def test_it_is_usable_by_keyboard_at_320_pixels(page: Page) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    page.keyboard.press("Tab")
    for name in ("Race", "Edit", "Server", "Generate"):
        page.keyboard.press("ArrowRight")
        page.get_by_role("tab", name=name, selected=True).wait_for()
        assert page.evaluate("() => document.documentElement.scrollWidth") == 320
    page.get_by_role("spinbutton", name="Tokens").fill("16")
    page.keyboard.press("Enter")
    page.locator("#tokens-generate .step").first.wait_for()
    box = page.locator("#tokens-generate").bounding_box()
    assert box is not None and 0 <= box["y"] < 400  # the answer is in view
    finish(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 320
    button = page.get_by_role("button", name="Generate")
    button.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert button.evaluate("button => getComputedStyle(button).outlineStyle") == "solid"


def test_the_server_view_shows_what_the_metrics_say(page: Page) -> None:
    page.get_by_role("tab", name="Server").click()
    page.get_by_text("0 of 32 in use").wait_for()
    page.get_by_text("0 waiting").wait_for()
    page.get_by_text("0 % of the memory").wait_for()
    assert page.locator(".square").count() == 32
    assert page.locator("#view").get_by_text(re.compile("NaN|undefined")).count() == 0


def test_a_key_is_asked_for_where_the_server_wants_one(page: Page) -> None:
    def locked(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            body = {"error": {"message": "the API key is missing or wrong"}}
            route.fulfill(status=401, json=body)

    page.route("**/v1/**", locked)
    page.reload()
    assert page.get_by_role("button", name="Generate").is_disabled()
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Generate", disabled=False).wait_for()
    assert page.get_by_label("API key").count() == 0


@pytest.mark.parametrize(("api", "then"), [("Completion", "Race"), ("Chat", "Edit")])
def test_the_lines_of_python_do_the_same(
    page: Page, api: str, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page.get_by_role("radio", name=api).check()
    page.get_by_role("spinbutton", name="Tokens").fill("10")
    page.get_by_role("button", name="Generate").click()
    page.locator("#tokens-generate .step").first.wait_for()
    finish(page)
    exec(page.locator("pre").inner_text(), {})
    assert capsys.readouterr().out == page.locator("#tokens-generate").text_content() != ""
    page.get_by_role("tab", name=then).click()
    page.get_by_role("button", name=then, exact=True).wait_for()
    found: dict[str, Any] = {}
    exec(page.locator("pre").inner_text(), found)  # a race's lines compare the texts
    assert found.keys() >= {"Race": {"plain", "drafted"}, "Edit": {"stream"}}[then]


def test_a_conversation_has_turns_and_a_system_prompt(page: Page) -> None:
    page.get_by_role("spinbutton", name="Tokens").fill("6")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Message").fill("one two one two")
    with page.expect_response(STREAM) as caught:
        page.get_by_role("button", name="Generate").click()
    finish(page)
    asked = caught.value.request.post_data_json["messages"]
    assert asked == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two one two"},
    ]
    events = [json.loads(line[6:]) for line in caught.value.text().splitlines() if line.startswith("data: {")]
    said = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
    page.get_by_role("button", name="Reply").click()
    assert page.locator(".turns li").all_inner_texts() == [
        "user one two one two",
        f"assistant {said}".rstrip(),
    ]
    page.get_by_label("Message").fill("three")
    with page.expect_response(STREAM) as caught:
        page.get_by_role("button", name="Generate").click()
    finish(page)
    then = [{"role": "assistant", "content": said}, {"role": "user", "content": "three"}]
    assert caught.value.request.post_data_json["messages"] == [*asked, *then]
    page.get_by_role("button", name="New conversation").click()
    page.locator(".turns").wait_for(state="detached")


def test_an_answer_that_the_limit_cut_is_marked(page: Page) -> None:
    page.get_by_role("spinbutton", name="Tokens").fill("3")
    page.get_by_role("button", name="Generate").click()
    finish(page)
    page.get_by_text("cut at the limit: 3 tokens").wait_for()
    assert page.locator("#tokens-generate.cut").count() == 1


def test_lines_of_python_for_several_answers_print_each(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    page.get_by_role("spinbutton", name="Tokens").fill("4")
    page.get_by_role("tab", name="Server").click()
    shown = page.locator("pre").inner_text()
    assert "n=8," in shown and "stream" not in shown
    found: dict[str, Any] = {}
    exec(shown, found)
    assert [answer.index for answer in found["answers"].choices] == list(range(8))
    printed = "".join(f"{one.index} {one.message.content}\n" for one in found["answers"].choices)
    assert capsys.readouterr().out == printed


def test_a_page_without_a_key_asks_once_and_reports_no_error(page: Page) -> None:
    asked: list[str] = []

    def locked(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=401, json={"error": {"message": "the API key is missing or wrong"}})

    page.route("**/v1/**", locked)
    page.route("**/metrics", locked)
    page.reload()
    page.get_by_text("this server takes an API key").wait_for()
    page.get_by_role("tab", name="Server").click()
    page.get_by_text("give the API key").wait_for()
    assert page.locator(".error").count() == 0 and len(asked) == 1
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.locator(".error", has_text="missing or wrong").wait_for()


def test_a_refusal_is_shown(page: Page) -> None:
    page.get_by_role("radio", name="Completion").check()
    page.get_by_label("Text to continue").fill("word " * 9999)
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("maximum context length").wait_for()
