# SPDX-License-Identifier: Apache-2.0
"""A small serving engine on this package alone: continuous batching over the tiny Qwen3.5 of the examples.

    python examples/serve.py
    python examples/serve.py --requests 20 --new-tokens 48 --drafts 0

Requests arrive at random and share pools: a slot of states and windows each, pages of keys and values. Every step runs
one ragged batch of all of them:

    decoding   the last token and a few drafts looked up in the request's own text (prompt lookup): gated_delta_verify
               leaves the states alone, and one fold_ring for all layers applies the records of the accepted tokens
    prefill    the next chunk of a prompt: gated_delta_rule, which keeps a checkpoint of the state every 64 tokens
    windows    causal_conv1d with write_state=False over all rows, conv_state_write once the accepted counts are known
    prefixes   a prompt that begins like an earlier one starts from its last common checkpoint: copy_slots

Exit status 1 unless every request got the tokens that transformers' greedy generate gives it alone.
"""

import argparse
import dataclasses
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from generate import REPO_ID, generate, load_model, use_local_build, variant_of
from kernels import get_kernel
from tiny_model import decode, load_text
from tqdm import tqdm
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

PAGE = 64  # tokens of a page of keys and values, and between two checkpoints
CHUNK = 128  # most prompt tokens of a request in one step
RING = 8  # records of a ring row: the last token and up to 7 drafts


@dataclasses.dataclass
class Request:
    """One prompt and what it has become."""

    prompt: list
    new_tokens: int
    tokens: list = dataclasses.field(default_factory=list)  # prompt and generated
    slot: int = -1
    pages: list = dataclasses.field(default_factory=list)
    position: int = 0  # tokens that are in the states, windows, keys and values

    @property
    def generated(self):
        return self.tokens[len(self.prompt) :]

    @property
    def is_prefilling(self):
        return self.position < len(self.prompt)


@dataclasses.dataclass
class Row:
    """A request's part of one step."""

    request: Request
    tokens: list
    checkpoint: int = -1  # saved slot of the first checkpoint that this chunk passes
    next: int = -1  # the token that follows a prefill

    @property
    def is_prefill(self):
        return self.request.is_prefilling

    @property
    def reaches_the_end(self):
        return self.request.position + len(self.tokens) >= len(self.request.prompt)


class Pages:
    """Keys and values of the attention layers in pages that requests and prefixes share, counted."""

    def __init__(self, layers, pages, heads, dim, like):
        self.keys, self.values = like.new_zeros(2, layers, pages, PAGE, heads, dim)
        self.free, self.users = list(range(pages)), [0] * pages

    def take(self):
        page = self.free.pop()
        self.users[page] = 1
        return page

    def share(self, pages):
        for page in pages:
            self.users[page] += 1

    def drop(self, pages):
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)

    def write(self, layer, row, position, keys, values):
        """keys, values [tokens, heads, dim] of a row at its positions."""
        at = torch.arange(position, position + len(keys))
        pages = torch.tensor(row.request.pages)[at // PAGE].to(keys.device)
        places = (at % PAGE).to(keys.device)
        self.keys[layer, pages, places], self.values[layer, pages, places] = keys, values

    def read(self, layer, row, length):
        pages = row.request.pages[: -(-length // PAGE)]
        return (pool[layer, pages].flatten(0, 1)[:length] for pool in (self.keys, self.values))


class Prefixes:
    """Checkpoints by the tokens that lead to them. Saved slots are handed out in turn, the oldest are forgotten."""

    def __init__(self, slots, pages):
        self.slots, self.pages, self.next = slots, pages, 0
        self.by_tokens, self.by_slot = {}, {}

    def reserve(self, count):
        """The first of `count` neighbouring slots."""
        start = self.next if self.next + count <= self.slots else 0
        self.next = start + count
        for slot in range(start, start + count):
            if slot in self.by_slot:
                tokens = self.by_slot.pop(slot)
                self.pages.drop(self.by_tokens.pop(tokens)[1])
        return start

    def keep(self, tokens, slot, pages):
        if tokens not in self.by_tokens:
            self.pages.share(pages)
            self.by_tokens[tokens], self.by_slot[slot] = (slot, list(pages)), tokens

    def longest(self, prompt):
        """(tokens, saved slot, pages) of the longest one that leaves at least a token of the prompt to run."""
        for length in range((len(prompt) - 1) // PAGE * PAGE, 0, -PAGE):
            if tuple(prompt[:length]) in self.by_tokens:
                return length, *self.by_tokens[tuple(prompt[:length])]
        return 0, -1, []


def look_up(tokens, most):
    """Drafts: what followed the last three, two or one tokens where they stood before."""
    for size in (3, 2, 1):
        tail = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1) if most > 0 else ():
            if tokens[start : start + size] == tail:
                return tokens[start + size : start + size + most]
    return []


class Batch:
    """The rows of a step as tensors: decoding rows first, then prefill."""

    def __init__(self, rows, engine):
        self.rows, device = rows, engine.device
        lengths = [len(row.tokens) for row in rows]
        self.offsets = [sum(lengths[:n]) for n in range(len(rows) + 1)]
        self.decode_rows = sum(not row.is_prefill for row in rows)
        self.decode_tokens = self.offsets[self.decode_rows]
        self.ids = torch.tensor([[token for row in rows for token in row.tokens]], device=device)
        positions = [row.request.position + i for row in rows for i in range(len(row.tokens))]
        self.positions = torch.tensor(positions, device=device)
        self.cu_seqlens = torch.tensor(self.offsets, device=device)
        slots = torch.tensor([row.request.slot for row in rows])
        self.slots = [(layer * engine.num_slots + slots).to(device) for layer in range(len(engine.linear))]
        self.checkpoints = torch.tensor([row.checkpoint for row in rows[self.decode_rows :]], device=device)


class Engine:
    """The model, its pools, and the step."""

    def __init__(self, kernel, model, slots=8, drafts=4, saved=64):
        self.kernel, self.model, self.drafts = kernel, model.model, min(drafts, RING - 1)
        self.head, self.device = model.lm_head, model.device
        layers = self.model.layers
        self.linear = [layer.linear_attn for layer in layers if layer.block_type == "linear_attention"]
        attention = [layer.self_attn for layer in layers if layer.block_type == "full_attention"]
        first = self.linear[0]
        heads, dims = first.num_v_heads, (first.head_k_dim, first.head_v_dim)
        channels, width = first.conv1d.weight.shape[0], first.conv_kernel_size
        self.num_slots, self.free_slots = slots, list(range(slots))
        count, like = len(self.linear), first.A_log

        # Rows of one tensor: the live slots of every layer, then the saved ones of every layer.
        self.saved_rows = count * slots
        self.states = kernel.new_state(count * (slots + saved), heads, *dims, device=self.device)
        self.windows = like.new_zeros(count * (slots + saved), channels, width - 1)
        self.saved = self.states[self.saved_rows :].unflatten(0, (count, saved))
        self.saved_windows = self.windows[self.saved_rows :].unflatten(0, (count, saved))
        group = heads // first.num_k_heads
        self.ring = kernel.new_ring(count * slots, first.num_k_heads, RING, *dims, group, device=self.device)
        config = model.config
        pages = (slots + saved) * -(-config.max_position_embeddings // (4 * PAGE))
        self.pages = Pages(len(attention), pages, config.num_key_value_heads, config.head_dim, like)
        self.prefixes = Prefixes(saved, self.pages)
        self.running = []
        self.counts = {"steps": 0, "drafted": 0, "accepted": 0, "reused": 0, "prefilled": 0}

    # --- requests ---

    def admit(self, request):
        """Gives the request a slot, zeroed, or filled with the checkpoint of a prefix that is known."""
        request.slot, request.tokens = self.free_slots.pop(), list(request.prompt)
        length, saved, pages = self.prefixes.longest(request.prompt)
        layers = torch.arange(len(self.linear))
        rows = (layers * self.num_slots + request.slot).to(self.device)
        if length == 0:
            self.kernel.zero_slots(self.states, rows)
            self.kernel.zero_slots(self.windows, rows)
        else:
            source = (self.saved_rows + layers * self.prefixes.slots + saved).to(self.device)
            self.kernel.copy_slots(self.states, source, rows)
            self.kernel.copy_slots(self.windows, source, rows)
            self.pages.share(pages)
            self.counts["reused"] += length
        request.pages, request.position = list(pages), length
        self.running.append(request)

    def finish(self, request):
        self.running.remove(request)
        self.free_slots.append(request.slot)
        self.pages.drop(request.pages)

    def plan(self):
        """The rows of the next step: decoding ones first."""
        rows = []
        for request in sorted(self.running, key=lambda request: request.is_prefilling):
            if request.is_prefilling:
                chunk = request.prompt[request.position : request.position + CHUNK]
                row = Row(request, chunk)
                if len(chunk) >= PAGE:
                    row.checkpoint = self.prefixes.reserve(len(chunk) // PAGE)
            else:
                left = request.new_tokens - len(request.generated) - 1
                row = Row(request, request.tokens[-1:] + look_up(request.tokens, min(self.drafts, left)))
            while len(request.pages) * PAGE < request.position + len(row.tokens):
                request.pages.append(self.pages.take())
            rows.append(row)
        return rows

    # --- the model over one ragged batch ---

    def step(self):
        """Runs every request a bit further; returns those that are done and the number of new tokens."""
        rows = self.plan()
        batch = Batch(rows, self)
        inputs, hidden = [], self.model.embed_tokens(batch.ids)
        positions = self.model.rotary_emb(hidden, batch.positions.expand(3, 1, -1))
        linear = attention = 0
        for layer in self.model.layers:
            x = layer.input_layernorm(hidden)
            if layer.block_type == "linear_attention":
                mixed, columns = self.gated_delta_net(layer.linear_attn, x, batch, linear)
                inputs.append(columns)
                linear += 1
            else:
                mixed = self.attend(layer.self_attn, x, batch, attention, positions)
                attention += 1
            hidden = hidden + mixed
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        best = self.head(self.model.norm(hidden))[0].argmax(-1).tolist()
        accepted = [self.accept(row, best[first:]) for row, first in zip(rows, batch.offsets)]
        self.commit(batch, inputs, accepted)
        return self.advance(rows, accepted)

    def gated_delta_net(self, layer, x, batch, index):
        """One gated delta net layer over [1, total, hidden]; also the input of its convolution."""
        kernel, slots = self.kernel, batch.slots[index]
        columns = layer.in_proj_qkv(x)[0]
        options = {"cu_seqlens": batch.cu_seqlens, "slots": slots, "write_state": False}
        weight = layer.conv1d.weight.squeeze(1)
        mixed = kernel.causal_conv1d(columns, weight, None, layer.activation, conv_state=self.windows, **options)
        q, k, v = mixed[None].split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        q, k = (y.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)) for y in (q, k))
        v = v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
        g, beta = kernel.gated_delta_gates(layer.in_proj_a(x), layer.in_proj_b(x), layer.A_log, layer.dt_bias)
        o, split, rows = torch.empty_like(v), batch.decode_tokens, batch.decode_rows
        if rows > 0:
            part = [y[:, :split] for y in (q, k, v, g, beta)]
            options = {"slots": slots[:rows], "ring_slots": slots[:rows], "cu_seqlens": batch.cu_seqlens[: rows + 1]}
            kernel.gated_delta_verify(*part, self.states, self.ring, use_qk_l2norm=True, out=o[:, :split], **options)
        if rows < len(batch.rows):
            part = [y[:, split:] for y in (q, k, v, g, beta)]
            options = {"slots": slots[rows:], "cu_seqlens": batch.cu_seqlens[rows:] - split}
            saving = {
                "checkpoint_every": PAGE,
                "checkpoints": self.saved[index],
                "checkpoint_starts": batch.checkpoints,
            }
            kernel.gated_delta_rule(
                *part, self.states, use_qk_l2norm=True, mode="recurrent", out=o[:, split:], **options, **saving
            )
        z = layer.in_proj_z(x).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
        normed = kernel.rms_norm_gated(o, z, layer.norm.weight, layer.norm.variance_epsilon)
        return layer.out_proj(normed.flatten(-2)), columns

    def attend(self, layer, x, batch, index, positions):
        """One full attention layer: each row attends to the pages of its request."""
        shape = (1, x.shape[1], -1, layer.head_dim)
        q, gate = layer.q_proj(x).view(1, x.shape[1], -1, 2 * layer.head_dim).chunk(2, -1)
        q, k = layer.q_norm(q), layer.k_norm(layer.k_proj(x).view(shape))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *positions)
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), layer.v_proj(x).view(shape)[0]
        pieces = []
        for row, first, last in zip(batch.rows, batch.offsets, batch.offsets[1:]):
            start = row.request.position
            self.pages.write(index, row, start, k[first:last], v[first:last])
            keys, values = self.pages.read(index, row, start + last - first)
            seen = torch.arange(len(keys), device=x.device) <= torch.arange(start, len(keys), device=x.device)[:, None]
            heads = (y.transpose(0, 1)[None] for y in (q[first:last], keys, values))
            out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=layer.scaling, enable_gqa=True)
            pieces.append(out[0].transpose(0, 1).flatten(1))
        return layer.o_proj(torch.cat(pieces)[None] * torch.sigmoid(gate.flatten(2)))

    # --- what becomes of it ---

    def accept(self, row, best):
        """Tokens of the row that stand: all of a prefill, else the last token and the drafts that were right."""
        if row.is_prefill:
            row.next = best[len(row.tokens) - 1]
            return len(row.tokens)
        count = 1
        while count < len(row.tokens) and row.tokens[count] == best[count - 1]:
            count += 1
        self.counts["drafted"] += len(row.tokens) - 1
        self.counts["accepted"] += count - 1
        row.tokens = row.tokens[:count] + [best[count - 1]]
        return count

    def commit(self, batch, inputs, accepted):
        """One fold for all layers, a window write for each, and the windows that belong to the checkpoints."""
        counts = torch.tensor(accepted, device=self.device)
        rows = batch.decode_rows
        if rows > 0:
            tables = torch.stack(batch.slots)[:, :rows]
            self.kernel.fold_ring(self.states, self.ring, slots=tables, ring_slots=tables, num_accepted=counts[:rows])
        for columns, slots, saved in zip(inputs, batch.slots, self.saved_windows):
            for row, first in zip(batch.rows[rows:], batch.offsets[rows:]):
                for i in range(len(row.tokens) // PAGE):
                    end = first + (i + 1) * PAGE
                    saved[row.checkpoint + i] = columns[end - saved.shape[-1] : end].T
            options = {"num_accepted": counts, "slots": slots, "cu_seqlens": batch.cu_seqlens}
            self.kernel.conv_state_write(columns, self.windows, **options)
        for row in batch.rows[rows:]:
            for i in range(len(row.tokens) // PAGE):
                length = row.request.position + (i + 1) * PAGE
                pages = row.request.pages[: length // PAGE]
                self.prefixes.keep(tuple(row.request.prompt[:length]), row.checkpoint + i, pages)

    def advance(self, rows, accepted):
        done, new = [], 0
        for row, count in zip(rows, accepted):
            request, is_prefill, ends = row.request, row.is_prefill, row.reaches_the_end
            request.position += count
            if is_prefill:
                self.counts["prefilled"] += count
            grown = row.tokens[1:] if not is_prefill else [row.next] if ends else []
            request.tokens += grown
            new += len(grown)
            if len(request.generated) >= request.new_tokens:
                done.append(request)
        for request in done:
            self.finish(request)
        self.counts["steps"] += 1
        return done, new


def make_requests(count, new_tokens, seed):
    """Prompts of 8 to 400 bytes of the held-out text; every third begins with the same passage."""
    text, random = load_text()[1].tolist(), torch.Generator().manual_seed(seed)
    common, requests = text[:160], []
    for n in range(count):
        length = int(torch.randint(8, 401, (1,), generator=random))
        start = int(torch.randint(0, len(text) - 500, (1,), generator=random))
        prompt = text[start : start + length]
        requests.append(Request(common + prompt if n % 3 == 0 else prompt, new_tokens))
    return requests


@torch.inference_mode()
def serve(engine, requests, seed=0, show=True):
    """Runs all requests, which arrive at random; returns the seconds it took."""
    waiting, arriving, random = [], list(requests), torch.Generator().manual_seed(seed)
    total, start = sum(request.new_tokens for request in requests), time.perf_counter()
    with tqdm(total=total, unit="token", disable=not show) as bar:
        while arriving or waiting or engine.running:
            while arriving and float(torch.rand(1, generator=random)) < 0.5:
                waiting.append(arriving.pop(0))
            while waiting and engine.free_slots:
                engine.admit(waiting.pop(0))
            if engine.running:
                _, new = engine.step()
                counts = engine.counts
                rate = counts["accepted"] / max(counts["drafted"], 1)
                bar.set_postfix_str(f"accepted {rate:.0%} of drafts, slots {len(engine.running)}/{engine.num_slots}")
                bar.update(new)
    return time.perf_counter() - start


def alone(model, request):
    """What plain greedy generate gives this prompt."""
    ids = torch.tensor([request.prompt], device=model.device)
    return generate(model, ids, request.new_tokens).tolist()


def main():
    parser = argparse.ArgumentParser(description="Serve many prompts at once and compare with greedy generate.")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64, help="bytes to generate for each")
    parser.add_argument("--slots", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--drafts", type=int, default=4, help="tokens to look up and verify at a time, at most 7")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    use_local_build()
    kernel = get_kernel(REPO_ID, version=1)
    has_cuda = variant_of(kernel)[1]["backend"]["type"] == "cuda" and torch.cuda.is_available()
    model = load_model(args.device or ("cuda" if has_cuda else "cpu"), torch.float32)
    requests = make_requests(args.requests, args.new_tokens, seed=1)

    engine = Engine(kernel, model, args.slots, args.drafts)
    seconds, counts = serve(engine, requests), engine.counts
    tokens = args.requests * args.new_tokens
    rate = counts["accepted"] / max(counts["drafted"], 1)
    print(f"served    {args.requests} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s, "
          f"{counts['steps']} steps")  # fmt: skip
    print(f"drafts    {counts['accepted']} of {counts['drafted']} accepted ({rate:.0%})")
    print(f"prompts   {counts['prefilled']} tokens prefilled, {counts['reused']} taken from checkpoints")
    start = time.perf_counter()
    expected = [alone(model, request) for request in tqdm(requests, desc="one by one")]
    seconds = time.perf_counter() - start
    print(f"generate  the same prompts one by one: {tokens / seconds:.0f} tokens/s")
    wrong = [n for n, (request, ids) in enumerate(zip(requests, expected)) if request.generated != ids]
    print(f"ids       {'agree, token for token' if not wrong else f'DIFFER for requests {wrong}'}")
    print(f"\nrequest 0: {decode(requests[0].tokens)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
