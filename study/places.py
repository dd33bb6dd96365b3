"""Places: (kind, task, eps, T, optimizer)"""
inf = float("inf")
P = [
 ("image", "glyphs/128-64", 8, 100, "adamw"), ("image", "glyphs/128-64", 1, 100, "adamw"), ("image", "glyphs/256", 3, 10, "adamw"), ("image", "glyphs/256", 1, 400, "adamw"), ("image", "glyphs/512-512", 3, 60, "adamw"),
 ("image", "digits/128", 8, 50, "adamw"), ("image", "digits/128", 1, 50, "adamw"), ("image", "cifar/64", 3, 100, "adamw"), ("image", "gtsrb/128", 8, 100, "adamw"), ("image", "gtsrb/conv", 3, 60, "adamw"), ("image", "gtsrb/128", 1, 40, "adamw"),
 ("pre", "digits/premlp", 8, 30, "adamw"), ("pre", "digits/premlp", 1, 30, "adamw"), ("pre", "gtsrb_odd/preconv", 8, 40, "adamw"), ("pre", "gtsrb_odd/preconv", 1, 40, "adamw"), ("pre", "gtsrb_odd/preconv", 3, 10, "adamw"),
 ("tab", "bank/64", 3, 100, "adamw"), ("tab", "bank24/64", 1, 50, "adamw"), ("tab", "bank24/64", 8, 100, "adamw"), ("tab", "nursery/64", 8, 60, "adamw"), ("tab", "nursery/64", 1, 60, "adamw"), ("tab", "clf/128", 8, 100, "adamw"), ("tab", "clf/128", 1, 50, "adamw"), ("tab", "imb24/64", 3, 50, "adamw"), ("tab", "nursery/64", 3, 10, "adamw"), ("tab", "nursery/64-32", 3, 1000, "adamw"),
 ("few", "pendigits/64", 8, 100, "adamw"), ("few", "pendigits/64", 1, 50, "adamw"), ("few", "pendigits/64", 3, 20, "adamw"), ("few", "pendigits/32", 3, 2000, "adamw"),
 ("bow", "rt/lin", 8, 50, "adamw"), ("bow", "rt/lin", 1, 50, "adamw"), ("bow", "rt/32", 3, 100, "adamw"), ("bow", "rt/32", 8, 40, "adamw"),
 ("emb", "cifar_emb/lin", 3, 60, "adamw"), ("emb", "cifar_emb/lin", 1, 100, "adamw"), ("emb", "cifar_emb/64", 8, 60, "adamw"),
 ("logit", "pendigits/lin", 3, 50, "adamw"), ("logit", "bank24/lin", 3, 50, "adamw"), ("logit", "nursery/lin", 1, 100, "adamw"),
 ("sgd", "glyphs/128-64", 3, 100, "sgd"), ("sgd", "pendigits/64", 3, 60, "sgd"), ("sgd", "nursery/64", 8, 60, "sgd"), ("sgd", "rt/lin", 3, 50, "sgd"), ("sgd", "digits/premlp", 3, 30, "sgd"), ("sgd", "bank24/64", 3, 60, "sgd"),
 ("inf", "glyphs/128-64", inf, 100, "adamw"), ("inf", "nursery/64", inf, 60, "adamw"), ("inf", "rt/32", inf, 50, "adamw"),
]
# kinds and sizes looked at only after the rule was chosen
FRESH = [
 ("deep", "clf/64-64-64-64", 3, 80, "adamw"), ("deep", "nursery/64-64-64-64", 3, 60, "adamw"), ("wide", "digits/512-512", 3, 100, "adamw"), ("wide", "cifar/256", 8, 150, "adamw"), ("wide", "pendigits/512-512", 1, 60, "adamw"),
 ("pixels", "cifar/lin", 3, 100, "adamw"), ("pixels", "gtsrb/lin", 3, 60, "adamw"), ("pixels", "glyphs/lin", 1, 60, "adamw"), ("pixels", "digits/lin", 3, 40, "adamw"),
 ("moons", "moons/32", 1, 60, "adamw"), ("moons", "moons/32-32", 3, 150, "adamw"), ("cancer", "cancer/32", 8, 50, "adamw"), ("cancer", "cancer/lin", 8, 30, "adamw"),
 ("wide", "gtsrb/128", 1, 400, "adamw"), ("bow2", "rt/128", 3, 200, "adamw"), ("conv", "glyphs16/conv", 3, 80, "adamw"), ("conv", "gtsrb/conv", 8, 150, "sgd"), ("wide", "digits/256", 3, 60, "sgd"), ("pixels", "cifar/lin", 8, 60, "sgd"),
 ("vit", "vit/full", 8, 30, "adamw"), ("vit", "vit/full", 1, 30, "adamw"), ("vit", "vit/bitfit", 3, 30, "adamw"),
 ("gpt", "gpt/full", 8, 40, "adamw"), ("gpt", "gpt/full", 1, 40, "adamw"),
]
