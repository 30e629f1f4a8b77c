"use strict";
// Shows the cases of a contract when it is opened, and filters contracts and cases. Every text is set as text.
(async () => {
  const AT_ONCE = 100;
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (char) => char.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(unpacked).text());
  const form = document.getElementById("filter");
  const found = document.getElementById("found");
  const [search, verdict, target, chapter] = ["search", "verdict", "target", "chapter"].map((id) => document.getElementById(id));
  const chapters = [...document.querySelectorAll("details.chapter")].map((box) => ({
    box,
    contracts: [...box.querySelectorAll("details.contract")].map((contract) => ({
      box: contract,
      holder: contract.querySelector(".cases"),
      words: contract.textContent.toLowerCase(),
      cases: data.cases[contract.id] || [],
      chosen: data.cases[contract.id] || [],
    })),
  }));
  const texts = new Map();

  const make = (name, words, className) => {
    const element = document.createElement(name);
    if (words !== undefined) element.textContent = words;
    if (className) element.className = className;
    return element;
  };

  const wordsOf = (one) => {
    if (!texts.has(one)) {
      const said = Object.values(one[5] || {}).map((number) => data.texts[number]);
      const seen = one[4].flatMap((row) => data.rows[row].slice(0, 3).map((number) => data.texts[number]));
      texts.set(one, [one[0], ...said, ...seen].join(" ").toLowerCase());
    }
    return texts.get(one);
  };

  const evidence = (one) => {
    const parts = [];
    for (const [name, number] of Object.entries(one[5] || {})) {
      const words = data.texts[number];
      const line = make("p", name === "node" ? "" : name + ": ");
      line.append(make(name === "detail" || name === "snippet" ? "pre" : name === "node" ? "code" : "span", words));
      parts.push(line);
    }
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const words of ["measured", "value", "required"]) {
      const cell = make("th", words);
      cell.scope = "col";
      head.append(cell);
    }
    const body = table.createTBody();
    for (const number of one[4]) {
      const [name, value, required] = data.rows[number].slice(0, 3).map((place) => data.texts[place]);
      const holds = data.rows[number][3];
      const row = body.insertRow();
      const first = make("th", holds ? name : "DOES NOT HOLD: " + name, holds ? "" : "off");
      first.scope = "row";
      row.append(first, make("td", value), make("td", required || "(a fact, no bound)"));
    }
    const wide = make("div", undefined, "table");
    wide.append(one[4].length ? table : make("p", "no evidence"));
    return [...parts, wide];
  };

  const caseBox = (one) => {
    const [word, tone] = data.verdicts[one[2]];
    const box = make("details");
    const summary = make("summary");
    summary.append(make("span", word, "badge " + tone), " " + one[0] + " ", make("span", `${data.targets[one[1]]}, ${one[3]} s`, "counted"));
    box.append(summary);
    box.addEventListener("toggle", () => box.childElementCount < 2 && box.append(...evidence(one)), { once: true });
    return box;
  };

  const more = (contract) => {
    const { holder, chosen } = contract;
    const shown = holder.querySelectorAll(":scope > details").length;
    holder.querySelector(":scope > button")?.remove();
    const added = chosen.slice(shown, shown + AT_ONCE).map(caseBox);
    holder.append(...added);
    const left = chosen.length - shown - AT_ONCE;
    if (left > 0) {
      const button = make("button", `Show ${Math.min(left, AT_ONCE)} of ${left} more cases`);
      button.addEventListener("click", () => {
        const first = more(contract)[0];
        first.querySelector("summary").focus();
      });
      holder.append(button);
    }
    return added;
  };

  const show = (contract) => {
    contract.holder.replaceChildren();
    if (contract.box.open) more(contract);
  };

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = data.verdicts.findIndex(([word]) => word === verdict.value);
    const passed = data.verdicts.findIndex(([word]) => word === "PASS");
    const place = data.targets.indexOf(target.value);
    const ofCases = verdict.value || target.value;
    let contracts = 0;
    let cases = 0;
    for (const { box, contracts: members } of chapters) {
      let any = false;
      for (const contract of members) {
        const rest = words.filter((word) => !contract.words.includes(word));
        contract.chosen = contract.cases.filter(
          (one) =>
            (!verdict.value || (verdict.value === "not PASS" ? one[2] !== passed : one[2] === wanted)) &&
            (!target.value || one[1] === place) &&
            rest.every((word) => wordsOf(one).includes(word)),
        );
        const keep = (!chapter.value || chapter.value === box.dataset.name) && (contract.chosen.length > 0 || (!ofCases && !rest.length));
        contract.box.hidden = !keep;
        if (keep) {
          any = true;
          contracts += 1;
          cases += contract.chosen.length;
        }
        show(contract);
      }
      box.hidden = !any;
      if (words.length || ofCases || chapter.value) box.open = any;
    }
    found.textContent = `${contracts} contracts, ${cases} cases`;
  };

  const reveal = () => {
    const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!box?.matches("details")) return;
    for (let outer = box; outer; outer = outer.parentElement?.closest("details")) {
      outer.hidden = false;
      outer.open = true;
    }
    box.scrollIntoView();
    box.querySelector("summary").focus({ preventScroll: true });
  };

  for (const { contracts } of chapters) {
    for (const contract of contracts) {
      contract.box.addEventListener("toggle", () => contract.box.open && !contract.holder.childElementCount && more(contract));
    }
  }
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, 150);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.matches("input, select, textarea")) {
      event.preventDefault();
      search.focus();
    }
  });
  window.addEventListener("hashchange", reveal);
  form.hidden = false;
  const every = chapters.flatMap(({ contracts }) => contracts);
  found.textContent = `${every.length} contracts, ${every.reduce((sum, { cases }) => sum + cases.length, 0)} cases`;
  if (location.hash) reveal();
})();
