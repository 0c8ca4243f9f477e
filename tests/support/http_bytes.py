"""Requests and answers as bytes, over plain connections."""

import contextlib
import json
import socket

ASK = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"


def post(body=ASK, head=HEAD, path=b"/v1/chat/completions"):
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (path, head, length, body)


def receive(connection, size=1 << 16):
    """Return the next bytes; raise ConnectionError if the connection has ended."""
    if not (part := connection.recv(size)):
        raise ConnectionError("the connection has ended")
    return part


def receive_head(connection):
    """Return the next bytes up to an empty line, and leave later bytes in the connection."""
    head, end = b"", b"\r\n\r\n"
    while not head.endswith(end):
        waiting = head + connection.recv(1 << 16, socket.MSG_PEEK)
        size = waiting.index(end) + len(end) if end in waiting else len(waiting)
        head += receive(connection, max(size - len(head), 1))
    return head


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
        data += receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += receive(connection)
    return int(lines[0].split()[1]), headers, json.loads(body)


def read_answer_of_many(connection):
    """Return the status of the next answer, reading not a byte more."""
    head = receive_head(connection)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length:
        length -= len(receive(connection, length))
    return int(head.split()[1])
