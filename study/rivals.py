"""python rivals.py : Prodigy, D-Adaptation, Schedule-Free AdamW at their defaults, on the noised gradient; the same places"""
import warnings; warnings.simplefilter("ignore")
from go import *
def rival(name, place, seed):
    _, tk, eps, T, _ = place; tr, va, m, B, delta = task(tk); N = len(tr[1]); q = B / N; sig = sigma_of(eps, delta, q, T)
    w = m.init(seed).clone().requires_grad_(True); gb, gn = (torch.Generator().manual_seed(1000 * k + seed) for k in (1, 2))
    if name == "prodigy": from prodigyopt import Prodigy; o = Prodigy([w], lr=1.)
    elif name == "prodigy_lin": from prodigyopt import Prodigy; o = Prodigy([w], lr=1.)
    elif name == "dadapt": from dadaptation import DAdaptAdam; o = DAdaptAdam([w], lr=1.)
    elif name == "sfree": from schedulefree import AdamWScheduleFree; o = AdamWScheduleFree([w], lr=.0025); o.train()
    for t in range(T):
        i = torch.nonzero(torch.rand(N, generator=gb) < q)[:, 0]; b = tuple(a[i] for a in tr)
        with torch.no_grad(): g = m.grad(w.detach(), b)
        if sig: g += sig * torch.randn(len(w), generator=gn)
        w.grad = g / B
        if name.endswith("_lin"): o.param_groups[0]["lr"] = 1 - t / T
        o.step()
    if name == "sfree": o.eval()
    return m.evaluate(w.detach(), va)
if __name__ == "__main__":
    seeds = [int(s) for s in os.environ.get("SEEDS", "0,1").split(",")]; have = done()
    for n in sys.argv[1].split(","):
        for p in sel():
            for sd in seeds:
                if (key(p), n, sd) in have: continue
                if n == "c002": a, l, _ = run(p[1], p[2], p[3], sd, opt=p[4], c=.02 * math.sqrt(p[3]))
                elif n == "c03": a, l, _ = run(p[1], p[2], p[3], sd, opt=p[4], c=.3)
                elif n == "c03half": a, l, _ = run(p[1], p[2], p[3], sd, opt=p[4], c=.3, sched="half")
                else: a, l = rival(n, p, sd)
                open(OUT, "a").write(json.dumps(dict(place=key(p), method=n, seed=sd, acc=round(a, 3), loss=round(l, 4) if math.isfinite(l) else None, info={})) + "\n")
