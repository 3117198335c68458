#!/usr/bin/env python3
"""Starts `segue up`, shows what it is for, and stays until Ctrl-C.

Usage: demo.py SEGUE_BINARY [arguments for `segue up`]
"""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request

LONG_WORDS = 4000  # about as many tokens
WORDS = "river stone lamp quiet orange window table garden seven carpet silver music paper north cloud".split()


def request(url, prompt, max_tokens=16):
    """Streams one chat; returns (route header, seconds to the first token, text)."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    call = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    begin = time.monotonic()
    first, text = None, ""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=600) as response:
        route = response.headers.get("x-segue-route", "")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"].get("message", "error event"))
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                if piece and first is None:
                    first = time.monotonic() - begin
                text += piece
    return route, first if first is not None else time.monotonic() - begin, text


def show(label, result):
    route, ttft, text = result
    print(f"{label:<20} first token after {ttft:7.3f} s   {'; '.join(route.split('; ')[:2])}", flush=True)
    return text


def demo(url):
    salt = random.randrange(10**9)
    random.seed(salt)
    filler = " ".join(random.choice(WORDS) for _ in range(LONG_WORDS))
    text = show("short, idle", request(url, "What is the capital of France? One sentence.", 24))
    print(f'{"":<20} "{" ".join(text.split())}"')

    long_result = []
    thread = threading.Thread(
        target=lambda: long_result.append(request(url, f"Note {salt}. {filler}\nWhat is this about?"))
    )
    thread.start()
    time.sleep(2)
    show("short, behind long", request(url, "What is the capital of Norway? One sentence."))
    thread.join()
    if long_result:
        show("long", long_result[0])


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    # With SEGUE_SUPERVISED the mesh ends when this pipe closes, so that it does
    # not outlive this script even if that is killed.
    process = subprocess.Popen(
        [sys.argv[1], "up", *sys.argv[2:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"SEGUE_SUPERVISED": "1"},
        text=True,
    )
    # Ctrl-C reaches the mesh as well; this script waits for it to stop its nodes.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    line = process.stdout.readline().strip()
    if not line.startswith("ready "):
        return process.wait() or 1
    url = line.removeprefix("ready ")
    print(f"{line}\n", flush=True)
    try:
        demo(url)
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        if process.poll() is None:
            print(f"demo request: {error}", file=sys.stderr)
    if process.poll() is None:
        print(f"\nThe mesh is yours until Ctrl-C. Try, from another terminal:\n"
              f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
              f"    -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'\n"
              f"  curl {url}/mesh/status", flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
