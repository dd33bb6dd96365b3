"""Flat-weight harness: exact per-sample automatic clipping, AdamW or SGD, public schedules, looks along the ray."""
import os, sys, json, math, time
os.environ.setdefault("OMP_NUM_THREADS", "1"); sys.path.append("/tmp/pipx")
import numpy as np, torch, torch.nn.functional as F
torch.set_num_threads(1)
from data import data
HERE = os.path.dirname(os.path.abspath(__file__)); SIG = HERE + "/sigma.json"
GAMMA = 1.01
def sigma_of(eps, delta, q, T):
    if eps == math.inf: return 0.0
    d = json.load(open(SIG)) if os.path.exists(SIG) else {}
    k = f"{eps}|{delta:.6g}|{q:.8g}|{T}"
    if k not in d:
        from hyfreedp.accounting import calibrate_noise
        d[k] = float(calibrate_noise(target_epsilon=eps, target_delta=delta, sample_rate=q, steps=T, probe="none").sigma)
        json.dump(d, open(SIG, "w"), indent=0)
    return d[k]

class MLP:
    def __init__(s, sizes): s.sizes = sizes; s.shapes = [(o, i) for i, o in zip(sizes, sizes[1:])]; s.d = sum(o * i + o for o, i in s.shapes)
    def init(s, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed); ls = [torch.nn.Linear(i, o) for o, i in s.shapes]
        return torch.cat([torch.cat([l.weight.detach().flatten(), l.bias.detach()]) for l in ls])
    def unflat(s, w):
        out, k = [], 0
        for o, i in s.shapes: out.append((w[k:k + o * i].view(o, i), w[k + o * i:k + o * i + o])); k += o * i + o
        return out
    def logits(s, w, x):
        L = s.unflat(w)
        for j, (W, b) in enumerate(L):
            x = torch.addmm(b, x, W.t())
            if j < len(L) - 1: x = x.relu_()
        return x
    def losses(s, w, b): return F.cross_entropy(s.logits(w, b[0]), b[1], reduction="none")
    def grad(s, w, b):
        x, y = b; L = s.unflat(w); acts = [x]
        for j, (W, bb) in enumerate(L):
            x = torch.addmm(bb, x, W.t())
            if j < len(L) - 1: x = x.relu_()
            acts.append(x)
        dl = F.softmax(acts[-1], 1); dl[torch.arange(len(y)), y] -= 1; ds = [None] * len(L); sq = torch.zeros(len(y))
        for j in range(len(L) - 1, -1, -1):
            ds[j] = dl; sq += (dl * dl).sum(1) * ((acts[j] * acts[j]).sum(1) + 1)
            if j > 0: dl = (dl @ L[j][0]) * (acts[j] > 0)
        c = (1 / (sq.sqrt() + .01))[:, None]; g = torch.empty_like(w); k = 0
        for j, (o, i) in enumerate(s.shapes):
            dc = ds[j] * c; torch.mm(dc.t(), acts[j], out=g[k:k + o * i].view(o, i)); g[k + o * i:k + o * i + o] = dc.sum(0); k += o * i + o
        return g
    def evaluate(s, w, d):
        z = s.logits(w, d[0]); return (z.argmax(1) == d[1]).float().mean().item() * 100, F.cross_entropy(z, d[1]).item()

class Conv(MLP):
    """two 3x3 convolutions of stride 2 on 16x16 grey images, then linear; per-sample gradients by im2col"""
    def __init__(s, k): s.shapes = [(16, 9), (32, 144), (k, 512)]; s.d = sum(o * i + o for o, i in s.shapes)
    def _fwd(s, w, x):
        (A, a), (B, b), (C, c) = s.unflat(w); n = len(x)
        u1 = F.unfold(x.view(n, 1, 16, 16), 3, stride=2, padding=1); h1 = (A @ u1 + a[:, None]).relu()
        u2 = F.unfold(h1.view(n, 16, 8, 8), 3, stride=2, padding=1); h2 = (B @ u2 + b[:, None]).relu(); f = h2.flatten(1)
        return u1, h1, u2, h2, f, torch.addmm(c, f, C.t())
    def logits(s, w, x): return s._fwd(w, x)[-1]
    def grad(s, w, b):
        x, y = b; n = len(y); u1, h1, u2, h2, f, z = s._fwd(w, x); (A, _), (B, _), (C, _) = s.unflat(w)
        dl = F.softmax(z, 1); dl[torch.arange(n), y] -= 1
        d2 = (dl @ C).view_as(h2) * (h2 > 0); g2 = d2 @ u2.transpose(1, 2); b2 = d2.sum(2)
        d1 = F.fold(B.t() @ d2, (8, 8), 3, stride=2, padding=1).view_as(h1) * (h1 > 0); g1 = d1 @ u1.transpose(1, 2); b1 = d1.sum(2)
        sq = (dl * dl).sum(1) * ((f * f).sum(1) + 1) + g2.square().sum((1, 2)) + b2.square().sum(1) + g1.square().sum((1, 2)) + b1.square().sum(1)
        c = 1 / (sq.sqrt() + .01); cd = dl * c[:, None]
        return torch.cat([torch.einsum("n,nij->ij", c, g1).flatten(), c @ b1, torch.einsum("n,nij->ij", c, g2).flatten(), c @ b2, (cd.t() @ f).flatten(), cd.sum(0)])

class Package:
    """a model of the package through its gradient engine"""
    def __init__(s, task, name, tuning):
        s.task, s.name, s.tuning, s.m = task, name, tuning, None
    def init(s, seed):
        from hyfreedp.gradients import AutomaticClipping, make_engine
        s.m = s.task.model(seed, s.name, s.tuning); s.ps = [p for p in s.m.parameters() if p.requires_grad]
        w0 = torch.cat([p.detach().flatten() for p in s.ps]).clone(); s.d = w0.numel(); s.buf = w0.clone(); k = 0
        for p in s.ps: p.data = s.buf[k:k + p.numel()].view_as(p); k += p.numel()
        s.engine = make_engine(s.m, AutomaticClipping()); s.fn = s.task.losses_of(s.m); return w0
    def losses(s, w, b):
        s.buf.copy_(w)
        with torch.no_grad(): return torch.cat([s.fn(tuple(a[i:i + 128] for a in b)) for i in range(0, len(b[0]), 128)])
    def grad(s, w, b):
        s.buf.copy_(w); s.engine.clear(); n = len(b[0])
        for i in range(0, n, 128): s.engine.add(s.fn, tuple(a[i:i + 128] for a in b))
        return torch.cat([g.flatten() for g in s.engine.clipped_sums(s.ps)]).float()
    def evaluate(s, w, d):
        s.buf.copy_(w); r = s.task.evaluate(s.m, d, s.name); return r.accuracy * 100, r.loss

def pretrained(model, public, name, head, epochs=8):
    """weights trained on public data, all but the head, which each seed draws anew"""
    path = f"/tmp/rule_{name}.pt"
    if os.path.exists(path): w = torch.load(path)
    else:
        w = model[0].init(99).requires_grad_(True); o = torch.optim.AdamW([w], 1e-3); g = torch.Generator().manual_seed(1); x, y = public
        for e in range(epochs):
            for i in torch.randperm(len(y), generator=g).split(100):
                o.zero_grad(); F.cross_entropy(model[0].logits(w, x[i]), y[i]).backward(); o.step()
        w = w.detach(); print(name, "public accuracy", model[0].evaluate(w, public), flush=True); torch.save(w, path)
    m = model[1]; base = m.init
    def init(seed):
        f = base(seed); k = m.d - m.shapes[-1][0] * (m.shapes[-1][1] + 1); f[:k] = w[:k]; return f
    m.init = init; return m

_t = {}
def task(name):
    """train part, validation part, model, expected batch, delta"""
    if name in _t: return _t[name]
    ds, mod = name.split("/")
    if ds in ("vit", ): 
        from hyfreedp.experiments.tasks.registry import TASKS
        tk = TASKS["digits"]; tr, va = tk.datasets("validation", "vit8_glyphs"); _t[name] = (tr.tensors, va, Package(tk, "vit8_glyphs", mod), tk.batch_size, tk.delta); return _t[name]
    if ds == "gpt":
        from hyfreedp.experiments.tasks.registry import TASKS
        tk = TASKS["restaurants_few"]; tr, va = tk.datasets("validation", "gpt2_sentences"); _t[name] = (tr.tensors, va, Package(tk, "gpt2_sentences", mod), tk.batch_size, tk.delta); return _t[name]
    if ds == "moons":
        from sklearn.datasets import make_moons
        from data import split
        data()[ds] = split(*make_moons(8000, noise=.25, random_state=3))
    if ds == "cancer":
        from sklearn.datasets import load_breast_cancer
        from data import split
        x, y = load_breast_cancer(return_X_y=True); data()[ds] = split(np.log1p(x) - 1.5, y)
    if ds == "glyphs16": data()[ds] = tuple((F.interpolate(x.view(-1, 1, 8, 8), scale_factor=2.).flatten(1), y) for x, y in data()["glyphs"])
    tr, va = data()[ds]; k = int(tr[1].max()) + 1; f = tr[0].shape[1]; B = {"cancer": 90, "digits": 250, "gtsrb_odd": 250, "bank": 500}.get(ds, 400)
    if mod == "conv": m = Conv(k)
    elif mod == "preconv": kp = int(data()["gtsrb_public"][1].max()) + 1; m = pretrained((Conv(kp), Conv(k)), data()["gtsrb_public"], "preconv", kp)
    elif mod == "premlp": m = pretrained((MLP([f, 128, 64, 10]), MLP([f, 128, 64, k])), data()["glyphs_public"], "premlp", 10)
    else: m = MLP([f] + [int(h) for h in mod.split("-") if h != "lin"] + [k])
    _t[name] = (tr, va, m, B, 1e-5 if len(tr[1]) > 5000 else 1e-4); return _t[name]

class Direction:
    def __init__(s, d, kind): s.kind = kind; s.m = torch.zeros(d); s.v = torch.zeros(d); s.t = 0; s.unit = None
    def __call__(s, g, w):
        s.t += 1
        if s.kind == "sgd":  # unit: rms of the first private gradient; displacement per gradient is 1
            if s.unit is None: s.unit = g.square().mean().sqrt().item()
            s.m.mul_(.9).add_(g); return s.m * (.1 / s.unit)
        s.m.lerp_(g, .1); s.v.mul_(.999).addcmul_(g, g, value=.001)
        return (s.m / (1 - .9 ** s.t)).div_((s.v / (1 - .999 ** s.t)).sqrt_().add_(1e-8)).add_(w, alpha=.01)

def schedule(kind, T):
    """shape of the rate, 1 at its highest"""
    return {"linear": lambda t: 1 - t / T, "half": lambda t: min(1., 2 * (1 - t / T)), "eig": lambda t: min(1., 8 * (1 - t / T)), "qtr": lambda t: min(1., 4 * (1 - t / T)), "const": lambda t: 1., "cos": lambda t: .5 * (1 + math.cos(math.pi * t / T))}[kind]

LADDER = tuple(2.4 / 2 ** j for j in range(8))
def crossing(v, lad, thr=0.):
    """v[j]: share that prefers lad[j] to lad[j+1], less those that prefer the lower; from the top, where the sign turns"""
    for j in range(len(v)):
        if v[j] > thr:
            if j == 0: return lad[0]
            a, b = v[j - 1] - thr, v[j] - thr; f = b / (b - a)
            lo, hi = .5 * math.log(lad[j] * lad[j + 1]), .5 * math.log(lad[j - 1] * lad[j]); return math.exp(lo + f * (hi - lo))
    return lad[-1]
def best_sum(v, lad, thr=0.):
    """the ladder's highest point if margins are added up from the bottom; then interpolated as a crossing there"""
    s = [0.]
    for x in reversed(v): s.append(s[-1] + x - thr)
    k = int(np.argmax(s)); j = len(v) - k  # index into lad
    if j == 0: return lad[0]
    if j == len(v): return lad[-1]
    a, b = v[j - 1] - thr, v[j] - thr; f = b / (b - a)
    lo, hi = .5 * math.log(lad[j] * lad[j + 1]), .5 * math.log(lad[j - 1] * lad[j]); return math.exp(lo + f * (hi - lo))

def walk(v, lad, thr, c):
    """from c up while clearly more prefer the higher rate, or down while clearly more prefer the lower; to where it is no longer clear"""
    x = np.log(np.array(lad)); mid = ((x[1:] + x[:-1]) / 2)[::-1]; V = np.array(v)[::-1]; lo, hi = x[-1], x[0]  # ascending
    g = np.arange(lo, hi + 1e-9, math.log(2) / 32); f = np.interp(g, mid, V); k = int(np.argmin(abs(g - math.log(c))))
    if f[k] > thr:
        while k < len(g) - 1 and f[k] > thr: k += 1
    elif f[k] < -thr:
        while k > 0 and f[k] < -thr: k -= 1
    else: return c
    return float(math.exp(g[k]))

def run(name, eps, T, seed, sched="linear", opt="adamw", c=None, rule=None):
    """one run; c: a fixed rate c / sqrt(T); rule: dict of the look. Returns validation accuracy, loss, info."""
    tr, va, m, B, delta = task(name); N = len(tr[0]); q = B / N
    sig = sigma_of(eps, delta, q, T); w = m.init(seed).clone(); w0 = w.clone(); d = len(w)
    gb, gn, gv = (torch.Generator().manual_seed(1000 * k + seed) for k in (1, 2, 3)); gz = torch.Generator().manual_seed(4000 + seed)
    D = Direction(d, opt); r = dict(c0=.3, at=(.08,), kap=.45, ramp=1., jump=1., stat="sign", pick="cross", anti=0, thr=0., moments="keep", lad=LADDER, up=99., noise=1, min=3, path=0, avg=0, warm=0, ups=None, mean=0)
    r.update(rule or {})
    sh = schedule(sched, T); c = c if rule is None else r["c0"]; info = {}
    looks = sorted({min(T - 1, max(r["min"], math.ceil(a * T)) if a < 1 else a) for a in r["at"]}) if rule is not None else []
    gp = math.sqrt(1 + T / max(1, len(looks)) * (GAMMA ** 2 - 1)); R0 = looks[0] if looks else 0
    est = [math.log(c)] if c else []  # the prior, then what each look says
    avg = None
    factor = 1.
    for t in range(T):
        i = torch.nonzero(torch.rand(N, generator=gb) < q)[:, 0]; b = tuple(a[i] for a in tr); extra = 1.
        if t in looks and len(i):
            lad = r["lad"]; steps_left = sum(sh(u) ** 2 for u in range(t, T)) / T; s = math.sqrt(max(0., steps_left)); extra = gp
            ce = c if t != R0 else c * factor  # effective rate of the first stretch
            made = [sh(u) * (1 - .9 ** (t - u) if opt == "sgd" else 1.) for u in range(t)]  # momentum without bias correction lags
            p = sum(made) / sum(map(sh, range(T)))  # share of the path that is made
            kap = 0. if eps == math.inf else r["kap"] * (math.sqrt(p) if r["path"] else 1.)
            tot = 0; prev = None
            for sgn in ((1, -1) if r["anti"] else (1,)):
                z = torch.randn(d, generator=gz) if sgn > 0 else -z
                if r.get("znorm"): z = z * r["znorm"](w, w0)
                L = [m.losses(w0 + (cj / ce) * (w - w0) + kap * cj * s * z, b).double() for cj in lad]
                if r["stat"] == "sign": S = [torch.sign(L[j + 1] - L[j]) for j in range(len(lad) - 1)]
                elif r["stat"] == "clip": S = [(L[j + 1] - L[j]).clamp(-1, 1) for j in range(len(lad) - 1)]
                elif r["stat"] == "prob": S = [torch.exp(-L[j]) - torch.exp(-L[j + 1]) for j in range(len(lad) - 1)]
                elif r["stat"] == "clips": S = [((L[j + 1] - L[j]) * r["k"]).clamp(-1, 1) for j in range(len(lad) - 1)]
                tot = torch.stack(S) + tot
            tot = tot / (2 if r["anti"] else 1); mlen = len(lad) - 1
            sl = sig * math.sqrt((r["noise"] if r["noise"] > 1 else mlen) / (1 - gp ** -2)) if sig else 0.
            v = ((tot.sum(1) + sl * torch.randn(mlen, generator=gv, dtype=torch.float64) * (r["noise"] > 0)) / B).tolist()
            if r["pick"] == "walk": cn = walk(v, lad, r["thr"], ce)
            else: cn = (crossing if r["pick"] == "cross" else best_sum)(v, lad, r["thr"]); cn = min(cn, (r["ups"][looks.index(t)] if r["ups"] else r["up"]) * ce)
            if r["mean"] == 2 and len(est) == 1 and not info: est = []
            if r["mean"]: est.append(math.log(cn)); cn = math.exp(r["mean"] * sum(est) / len(est) + (1 - r["mean"]) * est[-1] if r["mean"] < 1 else sum(est) / len(est))
            if r.get("clear"): cn = walk(v, lad, r["clear"], cn)  # the mean may not stand against so clear a vote
            k = 1. if t > 1 and not r["jump"] else min(r["jump"] if t > 1 else 99., cn / ce); w = w0 + k * (w - w0); info[t] = dict(c=round(cn, 4), v=[round(x, 2) for x in v], n=round(sl / B, 3)); c = cn
            if r["moments"] == "reset": D = Direction(d, opt)
        g = m.grad(w, b)
        if sig: g += (sig * extra) * torch.randn(d, generator=gn)
        G = D(g / B, w); f = sh(t)
        if rule is not None and t < R0 and r["ramp"] < 1: h = r["ramp"] ** (1 - (t + 1) / R0); f *= h; factor = (factor * t + h) / (t + 1) if t else h
        if rule is not None and r["warm"]: f *= 1 - .9 ** (t + 1)
        w = w.add(G, alpha=-c * f / math.sqrt(T))
        if r["avg"]:
            n = t + 1; avg = w.clone() if avg is None else avg.lerp(w, (1 + r["avg"]) / (n + r["avg"]))
    if avg is not None: info["last"] = m.evaluate(w, va)[0]; w = avg
    acc, loss = m.evaluate(w, va); return acc, loss, info
