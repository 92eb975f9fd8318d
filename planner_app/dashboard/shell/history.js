const REST_MS = 600;  // a slider in motion makes no entries
const place = window.pagecastHistory ??= { href: null, timer: 0 };
if (!place.listens) {
  place.listens = true;
  window.addEventListener("popstate", () => { place.href = location.href; }, true);
}

export default function () {
  clearTimeout(place.timer);
  place.timer = setTimeout(() => {
    const now = location.href, last = place.href;
    place.href = now;
    if (last === null || last === now || new URL(last).pathname !== location.pathname) return;
    history.replaceState({}, "", last);
    history.pushState({}, "", now);
  }, REST_MS);
}
