"""A stand-in for curl where there is none: what the commands of /docs use of it, and nothing else."""

import argparse
import http.client
import sys
from urllib.parse import urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("-s", action="store_true")
parser.add_argument("-i", action="store_true")
parser.add_argument("-o")
parser.add_argument("-X")
parser.add_argument("-H", action="append", default=[])
parser.add_argument("-d")
parser.add_argument("url")
asked = parser.parse_args()

url = urlsplit(asked.url)
connection = http.client.HTTPConnection(url.netloc, timeout=10)
connection.request(
    asked.X or ("GET" if asked.d is None else "POST"),
    url._replace(scheme="", netloc="").geturl(),
    body=None if asked.d is None else asked.d.encode(),
    headers=dict(header.split(": ", 1) for header in asked.H),
)
response = connection.getresponse()
if asked.i:
    sys.stdout.write(f"HTTP/1.1 {response.status} {response.reason}\r\n")
    sys.stdout.writelines(f"{name}: {value}\r\n" for name, value in response.getheaders())
    sys.stdout.write("\r\n")
text = response.read().decode()
if asked.o is None:
    sys.stdout.write(text)
