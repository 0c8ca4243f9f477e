"""Requests and answers as bytes, over plain connections."""

import contextlib
import json

ASK = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"


def post(body=ASK, head=HEAD, path=b"/v1/chat/completions"):
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (path, head, length, body)


def read_all(connection):
    """Return all that comes until the connection ends."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def read_answer(connection):
    """Return status, headers and body of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += connection.recv(1 << 16)
    return int(lines[0].split()[1]), headers, json.loads(body)


def read_answer_of_many(connection):
    """Return the status of the next answer, reading not a byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length:
        length -= len(connection.recv(length))
    return int(head.split()[1])
