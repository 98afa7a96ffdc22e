"""A server of OpenAI's streamed completions that answers any prompt: `python fake_server.py PORT MILLISECONDS`.

A token takes MILLISECONDS, and so does every 64 tokens of a prompt. A prompt that begins with token 7 gets an error,
one that begins with token 8 a token too few.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS = float(sys.argv[2]) / 1e3


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"]
        assert asked["temperature"] == 0
        if asked["prompt"][0] == 7:
            self.send_error(500, "seven")
            return
        self.send_response(200)
        self.end_headers()
        time.sleep(SECONDS * len(asked["prompt"]) / 64)
        tokens = asked["max_tokens"] - (asked["prompt"][0] == 8)
        for _ in range(tokens):
            time.sleep(SECONDS)
            self.event({"choices": [{"text": "a"}]})
        self.event({"choices": [{"text": "", "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
