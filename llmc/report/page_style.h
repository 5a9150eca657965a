/*
page_style.h -- the style sheet of a report.

Colors are Okabe and Ito's, which people with any color vision can tell apart, darker on white and
lighter on black so that each has a contrast of at least 3 to 1; several runs also have letters.
Each curve is styled by a single class, without ancestors: inside a <use>, selectors are matched
without the page around it.
*/
#ifndef LLMC_PAGE_STYLE_H
#define LLMC_PAGE_STYLE_H

// clang-format off
#define REPORT_STYLE \
":root{color-scheme:light dark;--page:#f4f5f7;--card:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d9dee4;--grid:#e6e9ed;--head:#eef1f4;" \
"--c0:#0072b2;--c1:#d55e00;--c2:#00805e;--c3:#b0437f;--c4:#8f6c00;--c5:#3c86b8;--c6:#6f42c1;--c7:#4d4d4d;--floor:#00805e;--warn:#b0437f;--more:#0003}\n" \
"@media (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--soft:#9aa5b1;--line:#30363d;--grid:#262c34;" \
"--head:#1f262e;--c0:#4aa8ea;--c1:#ff8a3d;--c2:#2cc393;--c3:#e68fc0;--c4:#f0d13c;--c5:#a9d8f5;--c6:#b79bf5;--c7:#c8ccd0;" \
"--floor:#2cc393;--warn:#e68fc0;--more:#fff4}}\n" \
"*{box-sizing:border-box}\n" \
"body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;" \
"-webkit-text-size-adjust:100%}\n" \
".page{max-width:1280px;margin:0 auto;padding:28px 24px 64px}\n" \
"h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}\n" \
"h2{font-size:19px;margin:40px 0 12px}h3{font-size:15px;margin:0}\n" \
".about{color:var(--soft);margin:4px 0 20px;overflow-wrap:anywhere}\n" \
".card{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0;padding:14px 16px 12px;min-width:0}\n" \
".facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(212px,1fr));gap:10px;margin:0}\n" \
".facts div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:9px 14px 10px;min-width:0}\n" \
".facts dt{color:var(--soft);font-size:13px}" \
".facts dd{margin:0;font-size:16px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}\n" \
".bar{position:sticky;top:0;z-index:1;display:flex;flex-wrap:wrap;gap:8px 24px;align-items:center;justify-content:space-between;" \
"background:var(--page);padding:10px 0;margin:16px 0 4px}\n" \
".switch{display:flex;align-items:center;border:0;margin:0;padding:0;min-width:0}.switch legend{float:left;padding:0;" \
"margin-right:10px;color:var(--soft);font-size:13px}\n" \
".switch input{position:absolute;opacity:0;width:1px;height:1px}\n" \
".switch label{border:1px solid var(--line);background:var(--card);padding:3px 13px;font-size:14px;cursor:pointer;margin-left:-1px}\n" \
".switch label:first-of-type{border-radius:7px 0 0 7px}.switch label:last-of-type{border-radius:0 7px 7px 0}\n" \
".switch input:checked+label{background:var(--ink);color:var(--card);border-color:var(--ink)}\n" \
".switch input:focus-visible+label{outline:3px solid var(--c0);outline-offset:1px}\n" \
".plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}.wide{grid-column:1/-1}\n" \
"figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:0 10px}figcaption p{margin:0;color:var(--soft);font-size:13px}\n" \
"svg.plot{display:block;overflow:visible;width:calc(100% - 78px);margin:14px 26px 40px 52px}\n" \
".plot text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}\n" \
".y line{stroke:var(--grid)}.y text{text-anchor:end}.ticks text{text-anchor:middle}.ticks .name{text-anchor:end}\n" \
"\n" \
".raw,.line,.val,.level,.skip,.rollback{fill:none;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round;" \
"vector-effect:non-scaling-stroke}\n" \
".one{--faint:.38;--mark:var(--warn);--dash:none}.many{--faint:.22;--dash:2 5}\n" \
".raw{stroke-width:1;opacity:var(--faint)}.line{stroke-width:2.2}.val{stroke-width:1.6;stroke-dasharray:var(--dash)}\n" \
".dots circle{fill:var(--c);stroke:var(--card);stroke-width:1}\n" \
".level{stroke:var(--floor);stroke-width:1.6;stroke-dasharray:7 5}\n" \
".skip{stroke:var(--mark,var(--c));stroke-width:1;stroke-dasharray:1 5}.rollback{stroke:var(--mark,var(--c));stroke-width:1.4;stroke-dasharray:9 3 2 3}\n" \
".plot .end{fill:var(--c);font-weight:700}\n" \
"svg.heat{display:block;width:100%;height:150px;margin:14px 0 6px;border:1px solid var(--line)}.heat path{fill:var(--c0)}\n" \
".c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}" \
".c7{--c:var(--c7)}\n" \
".x1,.x2{display:none}body:has(#a1:checked) .x1,body:has(#a2:checked) .x2{display:inline}" \
"body:has(#a1:checked) .x0,body:has(#a2:checked) .x0{display:none}\n" \
".legend,.runs{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:0;padding:0;font-size:13px}\n" \
".many .legend li{--c:var(--soft)}.legend{color:var(--soft)}.key{width:26px;height:12px;margin-right:7px;vertical-align:-1px}\n" \
".runs{font-size:14px;min-width:0}.runs li,.run{overflow-wrap:anywhere}th.run{min-width:150px}.runs b,.run b{display:inline-block;min-width:21px;" \
"border-radius:5px;background:var(--c);color:var(--card);text-align:center;margin-right:7px;font-size:13px}\n" \
 /* shadows at the sides where a table can be scrolled further */ \
".scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:" \
"linear-gradient(to right,var(--card) 40%,transparent) 0 0/60px 100% no-repeat local," \
"linear-gradient(to left,var(--card) 40%,transparent) 100% 0/60px 100% no-repeat local," \
"linear-gradient(to right,var(--more),transparent) 0 0/22px 100% no-repeat scroll," \
"linear-gradient(to left,var(--more),transparent) 100% 0/22px 100% no-repeat scroll,var(--card)}\n" \
"table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}\n" \
"th,td{padding:6px 14px;text-align:left;border-top:1px solid var(--grid);vertical-align:top}" \
"thead th{border-top:0;background:var(--head);vertical-align:bottom}tbody th{font-weight:400;color:var(--soft);white-space:nowrap}\n" \
".number td,.number thead th{text-align:right;white-space:nowrap}.number tbody th,.number thead th:first-child{text-align:left}" \
".number .total *{font-weight:600}\n" \
".wrap td{overflow-wrap:anywhere;min-width:135px}\n" \
".mib{position:relative}.mib i{position:absolute;right:10px;bottom:2px;height:3px;max-width:calc(100% - 20px);border-radius:2px;" \
"background:var(--c);opacity:.75}\n" \
"details{margin:0 0 8px}summary{cursor:pointer;padding:6px 0}summary:focus-visible{outline:3px solid var(--c0)}\n" \
".sample{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;margin:0 0 8px}\n" \
".sample p{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}.sample h4{margin:0 0 4px;font-size:13px;font-weight:400;color:var(--soft)}\n" \
".note{color:var(--soft);margin:8px 0 0}.events{margin:0;padding-left:20px}.soft,.none{color:var(--soft)}\n" \
"@media (max-width:760px){.page{padding:18px 12px 48px}.plots{grid-template-columns:minmax(0,1fr)}h1{font-size:21px}" \
".card{padding:12px 10px 8px}svg.plot{width:calc(100% - 64px);margin:12px 20px 38px 44px}.facts{grid-template-columns:repeat(2,minmax(0,1fr))}" \
".facts dd{font-size:15px}.bar{position:static}th,td{padding:6px 10px}}\n" \
"@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--grid:#ddd;--head:#eee;--c0:#0072b2;" \
"--c1:#d55e00;--c2:#00805e;--c3:#b0437f;--c4:#8f6c00;--c5:#3c86b8;--c6:#6f42c1;--c7:#4d4d4d;--floor:#00805e;--warn:#b0437f}" \
".page{max-width:none;padding:0}.bar{position:static}.switch{display:none}.card,.sample,.facts div{break-inside:avoid}" \
"h2{break-after:avoid}.scroll{overflow:visible}details::details-content{content-visibility:visible;block-size:auto}}\n"
// clang-format on

#endif
