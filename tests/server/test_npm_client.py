"""A client of another make: npm's openai, run by node. CI puts it into .node; NODE_PATH may name another folder."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from server_process import ROOT, Server

SCRIPT = """
import OpenAI from 'openai';
const client = new OpenAI({ baseURL: process.argv[2] + '/v1', apiKey: 'x' });
const messages = [{ role: 'user', content: 'hi' }];
const model = 'scripted', temperature = 0;
const whole = await client.chat.completions.create({ model, messages, temperature });
let text = '', usage = null;
const options = { model, messages, temperature, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options)) {
  text += chunk.choices[0]?.delta.content ?? '';
  usage = chunk.usage ?? usage;
}
let refused = null;
try { await client.chat.completions.create({ model, messages, tools: [] }); }
catch (error) { refused = [error.status, error.param, error.constructor.name]; }
const endless = await client.completions.create({ model, prompt: 'L', temperature, max_tokens: 4000, stream: true });
let seen = 0;
for await (const chunk of endless) if (++seen === 5) break;  // which closes the connection
const names = (await client.models.list()).data.map(each => each.id);
console.log(JSON.stringify([whole.choices[0].message.content, text, usage.completion_tokens, refused, seen, names]));
"""


def packages() -> Path | None:
    """Return the node_modules folder that holds npm's openai."""
    named = [Path(name) for name in os.environ.get("NODE_PATH", "").split(os.pathsep) if name]
    folders = [*named, ROOT / ".node/node_modules", ROOT / "node_modules"]
    return next((each for each in folders if (each / "openai/package.json").is_file()), None)


def test_the_client_of_npm(server: Server, tmp_path: Path):
    found = packages()
    if shutil.which("node") is None or found is None:
        reason = "node, or npm's openai in .node, node_modules or NODE_PATH, is not there"
        assert not os.environ.get("KAIROX_REQUIRE_NODE"), reason
        pytest.skip(f"{reason}: npm install --prefix .node openai")
    (tmp_path / "node_modules").symlink_to(found.resolve())
    (tmp_path / "chat.mjs").write_text(SCRIPT)
    done = subprocess.run(
        ["node", "chat.mjs", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole, text, tokens, refused, seen, names = json.loads(done.stdout)
    assert whole == text == "Hello, world!" and tokens == 4 and names == ["scripted"]
    assert refused == [400, "tools", "BadRequestError"] and seen == 5
    server.idle()  # the stream that was left does not run on
