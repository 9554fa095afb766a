"""The page's style sheet: one for light and dark, for wide and narrow.

The lines' colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart, darkened or lightened
for contrast; lines differ by their dashes as well.
"""

_LIGHT = ("#0072b2", "#d55e00", "#007a5a", "#b0508f", "#8a6d00", "#2a8fc4", "#555555", "#7a3fb0")
_DARK = ("#56b4e9", "#f0883e", "#2fc49a", "#e08fc4", "#e0c040", "#9ad0f5", "#b8b8b8", "#b794f4")
_DASHES = ("none", "7 3", "2 2", "9 3 2 3", "4 2", "12 3", "1 3", "6 2 1 2 1 2")
_VERSIONS_LIGHT = ("#cfe6f7", "#fbdcc4", "#c9ecdf", "#f0d5e6", "#f3e7b3", "#dcdcdc")
_VERSIONS_DARK = ("#17405c", "#5c3310", "#114a3a", "#552a47", "#4d4208", "#444444")

_BASE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--card:#f6f8fa;--edge:#d1d9e0;--grid:#e4e8ec;
--good:#007a5a;--idle:#c3cbd4}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6e9ed;--soft:#a0a9b3;--card:#1c2128;--edge:#3a424c;
--grid:#2b323a;--good:#2fc49a;--idle:#4a535d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:16px;background:var(--bg);color:var(--fg);overflow-wrap:anywhere;
font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:.3em 0}
h2{font-size:1.2rem;margin:2em 0 .4em;border-bottom:1px solid var(--edge)}
h3{font-size:1rem;margin:0}
p{margin:.5em 0;max-width:75ch}
.soft{color:var(--soft);font-size:.875rem;max-width:90ch}
.findings{background:var(--card);border-left:4px solid var(--c0);padding:8px 16px;margin:12px 0}
.lead p:first-child{font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:20px}
figure{margin:0;min-width:0}
figcaption{margin-bottom:4px}
figcaption p{margin:0}
svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}
svg .lane{fill:var(--fg);font-weight:600}
.grid{stroke:var(--grid)}
.axis{stroke:var(--soft)}
.line{fill:none;stroke-width:2}
.faint{fill:none;stroke-width:1;opacity:.35}
.band{opacity:.15}
.mark{stroke:var(--c1);stroke-width:1.5;stroke-dasharray:2 3}
.hit{fill:transparent}
.hit:hover{fill:var(--fg);fill-opacity:.12}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0;padding:0;list-style:none}
.legend li{display:flex;align-items:center;gap:6px}
.legend svg{width:34px;flex:none}
.wide{overflow-x:auto}
.wide svg{min-width:640px}
table{border-collapse:collapse;font-size:.9375rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--grid);vertical-align:top}
th:first-child,td:first-child,.left{text-align:left;min-width:9.5em}
thead th{color:var(--soft);font-weight:600;min-width:5em}
td{white-space:nowrap;overflow-wrap:normal}
td:first-child,td.text{white-space:normal}
.facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 14px;margin:8px 0}
.facts dt{color:var(--soft)}
.facts dd{margin:0}
.bar{display:flex;height:26px;border-radius:4px;overflow:hidden;margin:3px 0;background:var(--idle)}
.bar span{display:block;min-width:1px}
.share{margin:14px 0}
.keys{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0;padding:0;list-style:none;font-size:.875rem}
.keys i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.p-step{fill:var(--good);background:var(--good)}
.p-wait{fill:var(--c1);background:var(--c1)}
.p-publish{fill:var(--c3);background:var(--c3)}
.p-rest,.p-idle{fill:var(--idle);background:var(--idle)}
.p-restart{fill:var(--c4);background:var(--c4)}
.p-busy,.p-span{fill:var(--c0);background:var(--c0)}
.crowd{fill:var(--c0);opacity:.75}
.episode{border:1px solid var(--edge);border-radius:6px;margin:12px 0;overflow:hidden}
.episode header{display:flex;flex-wrap:wrap;gap:4px 14px;padding:6px 12px;background:var(--card);font-size:.875rem}
pre{margin:0;padding:10px 12px;white-space:pre-wrap;font:14px/1.55 ui-monospace,"DejaVu Sans Mono",monospace}
.given{color:var(--soft)}
.v{border-radius:2px;box-decoration-break:clone;-webkit-box-decoration-break:clone}
header .v{padding:0 5px}
details{margin:8px 0}
summary{cursor:pointer}
details pre{background:var(--card);max-height:70vh;overflow:auto}
@media (max-width:600px){figure svg text{font-size:12.5px}body{padding:12px;font-size:15px}th,td{padding:4px 6px}
.facts{grid-template-columns:minmax(5em,max-content) minmax(5em,1fr)}
th:first-child,td:first-child,.left{min-width:7em}}
@media print{.hit,details{display:none}}
"""


def style() -> str:
    """The style sheet as text."""

    def colours(palette: tuple[str, ...], versions: tuple[str, ...]) -> str:
        named = [f"--c{n}:{colour}" for n, colour in enumerate(palette)]
        return ":root{" + ";".join(named + [f"--v{n}:{colour}" for n, colour in enumerate(versions)]) + "}"

    lines = [
        f".c{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n});background:var(--c{n})}}.dot.c{n}{{fill:var(--c{n})}}"
        f".dash{n}{{stroke-dasharray:{dash}}}"
        for n, dash in enumerate(_DASHES)
    ]
    shades = [f".v{n}{{background:var(--v{n})}}" for n in range(len(_VERSIONS_LIGHT))]
    dark = f"@media (prefers-color-scheme:dark){{{colours(_DARK, _VERSIONS_DARK)}}}"
    return "\n".join((colours(_LIGHT, _VERSIONS_LIGHT), dark, _BASE.strip(), "".join(lines), "".join(shades)))
