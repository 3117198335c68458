#!/usr/bin/env python3
"""Does the official OpenAI client work against this server?

    scripts/openai_client_test.py --url http://127.0.0.1:8080 [--model ID] [--api-key KEY]

Prints one line per check and `N passed, M failed`; exits 1 if any failed.
"""

import argparse
import re
import sys

import openai

CHAT = [{"role": "user", "content": "Name three fruits, and say in one sentence what they taste like."}]
TEXT = "The capital of France is"
# Fixed sampling: what is streamed and what is not must then be the same answer.
FIXED = {"temperature": 0, "seed": 7, "max_tokens": 48}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def models_are_listed(client, model):
    models = list(client.models.list())
    assert any(entry.id == model for entry in models), [entry.id for entry in models]
    assert all(entry.object == "model" for entry in models)


def chat_answers(client, model):
    answer = client.chat.completions.create(model=model, messages=CHAT, **FIXED)
    choice = answer.choices[0]
    assert answer.object == "chat.completion", answer.object
    assert choice.message.role == "assistant", choice.message.role
    assert choice.message.content, "the answer is empty"
    check_end(choice.finish_reason, answer.usage)


def chat_streams_the_same_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=CHAT, **FIXED)
    chunks = list(client.chat.completions.create(model=model, messages=CHAT, **FIXED, **WITH_USAGE))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1, "chunks of one answer have one id"
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant", "the first chunk names the role"
    text = "".join(choice.delta.content or "" for choice in choices)
    same("text", text, whole.choices[0].message.content)
    compare_end(chunks, choices, whole)


def completion_answers(client, model):
    answer = client.completions.create(model=model, prompt=TEXT, **FIXED)
    assert answer.object == "text_completion", answer.object
    assert answer.choices[0].text, "the answer is empty"
    check_end(answer.choices[0].finish_reason, answer.usage)


def completion_streams_the_same_answer(client, model):
    whole = client.completions.create(model=model, prompt=TEXT, **FIXED)
    chunks = list(client.completions.create(model=model, prompt=TEXT, **FIXED, **WITH_USAGE))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    same("text", "".join(choice.text for choice in choices), whole.choices[0].text)
    compare_end(chunks, choices, whole)


def max_tokens_cut_with_reason_length(client, model):
    limits = FIXED | {"max_tokens": 3}
    answer = client.chat.completions.create(model=model, messages=CHAT, **limits)
    same("finish_reason", answer.choices[0].finish_reason, "length")
    same("completion_tokens", answer.usage.completion_tokens, 3)


def a_stop_string_ends_the_answer_and_is_not_in_it(client, model):
    free = client.completions.create(model=model, prompt=TEXT, **FIXED).choices[0].text
    words = free.split()
    assert len(words) >= 4, f"too short to cut: {free!r}"
    stop = words[2]
    cut = client.completions.create(model=model, prompt=TEXT, stop=[stop], **FIXED).choices[0]
    same("text", cut.text, free[: free.index(stop)])
    same("finish_reason", cut.finish_reason, "stop")


def without_include_usage_no_chunk_has_usage(client, model):
    chunks = list(client.chat.completions.create(model=model, messages=CHAT, stream=True, **FIXED))
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def a_stream_can_be_left_and_the_server_goes_on(client, model):
    for _ in range(3):
        with client.chat.completions.create(model=model, messages=CHAT, stream=True, **FIXED) as stream:
            next(iter(stream))
    chat_answers(client, model)


def a_prompt_that_is_too_long_is_a_bad_request_with_both_numbers(client, model):
    messages = [{"role": "user", "content": "word " * 300_000}]
    error = raises(
        openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=messages, **FIXED)
    )
    numbers = sorted(int(number) for number in re.findall(r"\d+", error.message.replace(",", "")))
    assert any(number >= 300_000 for number in numbers), f"length of the prompt is not named: {error.message}"
    assert any(128 <= number < 300_000 for number in numbers), f"context limit is not named: {error.message}"


def an_unknown_model_is_not_found(client, model):
    error = raises(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model="no-such-model", messages=CHAT, **FIXED),
    )
    assert "no-such-model" in error.message, error.message


def wrong_values_are_bad_requests(client, model):
    for wrong in ({"max_tokens": -5}, {"temperature": "hot"}, {"messages": []}):
        arguments = {"model": model, "messages": CHAT} | wrong
        raises(openai.BadRequestError, lambda: client.chat.completions.create(**arguments))


CHECKS = [
    models_are_listed,
    chat_answers,
    chat_streams_the_same_answer,
    completion_answers,
    completion_streams_the_same_answer,
    max_tokens_cut_with_reason_length,
    a_stop_string_ends_the_answer_and_is_not_in_it,
    without_include_usage_no_chunk_has_usage,
    a_stream_can_be_left_and_the_server_goes_on,
    a_prompt_that_is_too_long_is_a_bad_request_with_both_numbers,
    an_unknown_model_is_not_found,
    wrong_values_are_bad_requests,
]


def compare_end(chunks, choices, whole):
    """A stream ends like the answer that came whole: same reason, same usage, in its last chunk."""
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    same("finish reasons", reasons, [whole.choices[0].finish_reason])
    with_usage = [chunk for chunk in chunks if chunk.usage]
    same("chunks with usage", len(with_usage), 1)
    assert chunks[-1] is with_usage[0] and not chunks[-1].choices, "usage comes last, in a chunk without choices"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        same(name, getattr(with_usage[0].usage, name), getattr(whole.usage, name))


def check_end(finish_reason, usage):
    assert finish_reason in ("stop", "length"), finish_reason
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= FIXED["max_tokens"], usage
    same("total_tokens", usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)


def same(what, got, expected):
    assert got == expected, f"{what}: got {got!r}, expected {expected!r}"


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    except openai.APIError as error:
        raise AssertionError(f"expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {kind.__name__}, got an answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, with or without /v1")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--api-key", default="unused")
    parser.add_argument("--timeout-s", type=float, default=120)
    options = parser.parse_args()

    base_url = options.url.rstrip("/").removesuffix("/v1") + "/v1"
    # Without retries, so that an error of the server is seen and not repeated away.
    # Proxies of the environment are for other addresses than this one.
    client = openai.OpenAI(
        base_url=base_url,
        api_key=options.api_key,
        timeout=options.timeout_s,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    try:
        model = options.model or next(iter(client.models.list())).id
    except (openai.APIError, StopIteration) as error:
        sys.exit(f"{base_url}/models names no model: {error!r}")

    failed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            check(client, model)
            print(f"ok      {name}", flush=True)
        except Exception as error:  # a check may fail in any way; the others still run
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
