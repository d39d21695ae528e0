// The parts of the page, of which the address shows one: "#plan", "#server", and the chat for anything else.

import { byId } from "./dom.js";

const NAMES = ["chat", "plan", "server"];

export function shownTab() {
  const name = location.hash.slice(1);
  return NAMES.includes(name) ? name : NAMES[0];
}

// `onTurn` is called at once and after every change.
export function followTabs(onTurn) {
  const turn = () => {
    for (const name of NAMES) {
      const isShown = name === shownTab();
      byId(`${name}-part`).hidden = !isShown;
      byId(`to-${name}`).ariaCurrent = isShown ? "page" : null;
    }
    onTurn();
  };
  window.addEventListener("hashchange", turn);
  turn();
}
