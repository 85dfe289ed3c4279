'use strict';
// What the page can do beyond being read: exact values under the pointer and the arrow keys, sorting, copying, saving.
(() => {
const $ = (query, root = document) => root.querySelector(query);
const all = (query, root = document) => [...root.querySelectorAll(query)];
const make = (tag, attributes = {}, words = '') => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = words;
  return element;
};
const data = JSON.parse($('#report').textContent);
const at = path => plain(path.split('/').reduce((value, key) => value == null ? value : value[key], data));
function plain(value) {
  if (value?.same) value = value.same.split('/').reduce((part, key) => part[key], data);
  // a packed list: float32, or its upper bytes; of a symmetric matrix the upper triangle
  if (!value?.shape) return value;
  const size = value.f4 ? 4 : value.f3 ? 3 : 2, text = atob(value.f4 || value.f3 || value.b2);
  const wide = new DataView(new ArrayBuffer(4));
  let k = 0;
  const next = () => {
    for (let b = 0; b < size; b++) wide.setUint8(b, text.charCodeAt(size * k + size - 1 - b));
    k++;
    return wide.getFloat32(0);
  };
  const read = () => { const number = next(); return Number.isNaN(number) ? null : number; };
  const [rows, columns] = value.shape;
  if (columns === undefined) return Array.from({length: rows}, read);
  const matrix = Array.from({length: rows}, () => Array(columns));
  for (let i = 0; i < rows; i++)
    for (let j = value.symmetric ? i : 0; j < columns; j++) {
      matrix[i][j] = read();
      if (value.symmetric) matrix[j][i] = matrix[i][j];
    }
  return matrix;
}
const opened = new Map();  // matrices by their path
function matrix(source, errors, names) {
  if (!opened.has(source)) opened.set(source, {names: at(names), value: at(source), errors: errors && at(errors)});
  return opened.get(source);
}

// -- numbers, written as the page's own are

const SUPERSCRIPTS = {'-': '⁻', 0: '⁰', 1: '¹', 2: '²', 3: '³', 4: '⁴', 5: '⁵', 6: '⁶', 7: '⁷', 8: '⁸', 9: '⁹'};
const raised = exponent => [...String(exponent)].map(c => SUPERSCRIPTS[c]).join('');
function digits(value, count) {
  if (value === 0) return '0';
  const exponent = Number(value.toExponential(count - 1).split('e')[1]);
  if (exponent < -4 || exponent >= count) {
    const mantissa = String(Number(value.toExponential(count - 1).split('e')[0]));
    return (mantissa === '1' ? '' : mantissa.replace('-', '−') + '×') + '10' + raised(exponent);
  }
  return String(Number(value.toPrecision(count))).replace('-', '−');
}
function measured(value, error) {
  if (value == null) return 'not known';
  if (error === 0) return digits(value, 4);
  if (error == null) return digits(value, 3) + ' (error not known)';
  const exponent = Math.floor(Math.log10(Math.max(Math.abs(value), error)));
  const shift = exponent >= -3 && exponent < 5 ? 0 : exponent, scale = 10 ** shift;
  const places = Math.min(12, Math.max(0, 1 - Math.floor(Math.log10(error / scale))));
  const text = (value / scale).toFixed(places).replace('-', '−') + ' ± ' + (error / scale).toFixed(places);
  return shift ? `(${text})×10${raised(shift)}` : text;
}

// -- tips: the words of each mark, or of the cell of a map

const tip = make('div', {class: 'tip', hidden: ''});
document.body.append(tip);
const words = new WeakMap();
for (const title of all('svg title')) {  // or the browser would show its own beside ours
  const parent = title.parentNode;
  if (parent.tagName === 'svg') {
    parent.setAttribute('aria-label', title.textContent);
    parent.setAttribute('aria-description', $('desc', parent).textContent);
  } else words.set(parent, title.textContent);
  title.remove();
}
function show(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 16) + 'px';
}

class Map2 {  // the cells of one map
  constructor(svg) {
    this.svg = svg;
    const d = svg.dataset;
    [this.x, this.y, this.w, this.h, this.rows, this.cols] = ['x', 'y', 'w', 'h', 'rows', 'cols'].map(k => +d[k]);
    this.say = svg.closest('[data-panel]').dataset;
    for (const k of ['words', 'down', 'across']) if (this.say[k]) this[k] = this.say[k].split('|');
  }
  text(i, j) {
    const say = (row, column, value) => `${row} × ${column}: ${this.say.what} ${value}`;
    if (this.words) return say(this.down[i], this.across[j], this.words[i * this.cols + j] || this.say.absent || 'not known');
    const {source, errors, names, column} = this.say, map = matrix(source, errors, names);
    if (this.say.from) [i, j] = [i, j].map((k, side) => k + +this.say.from.split(',')[side]);  // part of a larger map
    const value = map.value[i][j];
    return say(map.names[i], column ? `${column} ${j}` : map.names[j],
      value == null ? 'none' : measured(value, map.errors ? map.errors[i][j] : 0));
  }
  find(event) {
    const box = this.svg.getBoundingClientRect(), scale = this.svg.viewBox.baseVal.width / box.width;
    const j = Math.floor(((event.clientX - box.left) * scale - this.x) / this.w);
    const i = Math.floor(((event.clientY - box.top) * scale - this.y) / this.h);
    return i >= 0 && j >= 0 && i < this.rows && j < this.cols ? [i, j] : null;
  }
  mark(i, j) {
    if (!this.cursor) {
      this.cursor = draw('rect', {class: 'cursor'});
      this.svg.append(this.cursor);
    }
    const box = {x: this.x + j * this.w, y: this.y + i * this.h, width: this.w, height: this.h};
    for (const [key, value] of Object.entries(box)) this.cursor.setAttribute(key, value);
    this.place = [i, j];
    const out = $('.readout', this.svg.closest('figure'));
    if (out) out.textContent = this.text(i, j);
  }
}

const maps = new WeakMap();
function attend(svg) {
  const map = svg.dataset.rows ? new Map2(svg) : null;
  if (map) maps.set(svg, map);
  const marks = map ? [] : all('circle,path,rect', svg).filter(mark => words.has(mark));
  let current = -1;
  svg.addEventListener('pointermove', event => {
    const cell = map && map.find(event);
    show(map ? cell && map.text(...cell) : words.get(event.target), event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', () => show(''));
  if (map) svg.addEventListener('click', event => { const cell = map.find(event); if (cell) pin(map, ...cell); });
  if (!map && !marks.length) return;
  svg.setAttribute('tabindex', '0');
  svg.setAttribute('role', 'application');
  svg.setAttribute('aria-roledescription', 'figure; arrow keys read its values');
  svg.addEventListener('blur', () => show(''));
  svg.addEventListener('keydown', event => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (event.key === 'Enter' && map && map.place) return pin(map, ...map.place);
    if (event.key === 'Escape') return show('');
    if (!step) return;
    event.preventDefault();
    if (map) {
      const [i, j] = map.place || [0, -step[1]];
      map.mark(Math.min(map.rows - 1, Math.max(0, i + step[0])), Math.min(map.cols - 1, Math.max(0, j + step[1])));
    } else {
      current = Math.min(marks.length - 1, Math.max(0, current + step[0] + step[1]));
      const box = marks[current].getBoundingClientRect(), out = $('.readout', svg.closest('figure'));
      show(words.get(marks[current]), box.right, box.top);
      if (out) out.textContent = words.get(marks[current]);
    }
  });
}
for (const svg of all('figure svg')) attend(svg);

// -- from a pair of layers to its blocks, and to the heads of a layer

function detail(map, i, j) {
  const {detail: source, low, high} = map.say, figure = map.svg.closest('figure');
  if (!source) return;
  const names = at(source + '/names'), {value} = matrix(source + '/value', at(source + '/exact') ? '' : source + '/stderr', source + '/names');
  const inside = layer => [...names.keys()].filter(k => names[k] === layer || names[k].startsWith(layer + '.'));
  const down = inside(map.down[i]), across = inside(map.across[j]), left = 130, top = 96, cell = 26;
  const box = make('div', {class: 'detail', 'data-panel': 'detail', 'data-choices': '', 'data-what': map.say.what, 'data-source': source + '/value',
    'data-errors': at(source + '/exact') ? '' : source + '/stderr', 'data-names': source + '/names', 'data-from': `${down[0]},${across[0]}`});
  const svg = draw('svg', {viewBox: `0 0 ${left + cell * across.length + 60} ${top + cell * down.length + 4}`,
    width: left + cell * across.length + 60, height: top + cell * down.length + 4,
    'data-x': left, 'data-y': top, 'data-w': cell, 'data-h': cell, 'data-rows': down.length, 'data-cols': across.length});
  svg.setAttribute('aria-label', `Blocks of ${map.down[i]} by ${map.across[j]}`);
  const span = Math.log(high / low) || 1;
  down.forEach((a, r) => {
    svg.append(draw('text', {class: 'name', x: left - 6, y: top + cell * r + 17, 'text-anchor': 'end'}, names[a]));
    across.forEach((b, c) => {
      const v = value[a][b], level = Math.min(63, Math.max(0, Math.floor(64 * Math.log(v / low) / span)));
      const look = v == null ? 'missing' : v === 0 ? 'nought' : 'q' + level;
      svg.append(draw('rect', {class: look, x: left + cell * c, y: top + cell * r, width: cell - 1, height: cell - 1}));
    });
  });
  across.forEach((b, c) => svg.append(draw('text', {class: 'name', x: left + cell * (c + .6), y: top - 6,
    transform: `rotate(-55 ${left + cell * (c + .6)} ${top - 6})`}, names[b])));
  box.append(make('h4', {}, i === j ? `Inside of ${map.down[i]}` : `${map.down[i]} × ${map.across[j]}`), svg);
  const heads = data.heads && at('heads/layers').findIndex(name => name.startsWith(map.down[i] + '.'));
  if (i === j && heads >= 0 && data.heads) {
    const norms = at('heads/norms/QQ')[heads].map(v => v == null ? '' : digits(v, 3)).filter(Boolean);
    const line = make('p', {class: 'how'}, `‖QQ‖ of its heads: ${norms.join(', ')}. `);
    line.append(make('a', {href: '#heads'}, 'All heads'));
    box.append(line);
  }
  $('.detail', figure)?.remove();
  $('.readout', figure).after(box);
  attend(svg);
}
function draw(tag, attributes, words) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (words) element.textContent = words;
  return element;
}

// -- a cell to come back to, in the address: #blocks@3,5

function pin(map, i, j) {
  map.mark(i, j);
  const panel = map.svg.closest('[data-panel]');
  detail(map, i, j);
  if (panel.dataset.panel === 'detail') return;
  history.replaceState(null, '', `#${panel.dataset.panel}@${i},${j}`);
}
function recall() {
  const [, name, i, j] = decodeURIComponent(location.hash).match(/^#(.+)@(\d+),(\d+)$/) || [];
  const panel = name && $(`[data-panel="${CSS.escape(name)}"]`);
  if (!panel) return;
  for (const choice of panel.dataset.choices.split(' ')) if (choice) $('#' + choice).checked = true;
  const svg = all('svg', panel).find(one => one.getBoundingClientRect().width) || $('svg', panel);
  const map = maps.get(svg);
  if (!map) return;
  map.mark(Math.min(+i, +svg.dataset.rows - 1), Math.min(+j, +svg.dataset.cols - 1));
  detail(map, ...map.place);
  panel.closest('figure').scrollIntoView();
}
addEventListener('hashchange', recall);

// -- tables

const cellsOf = row => [...row.cells].map(cell => cell.textContent.trim());
const key = text => text === '' || isNaN(text) ? text : +text;
function sort(table, column, header) {
  const down = header.getAttribute('aria-sort') === 'descending';
  all('th', table).forEach(th => th.removeAttribute('aria-sort'));
  header.setAttribute('aria-sort', down ? 'ascending' : 'descending');
  const rows = [...table.tBodies[0].rows].map(row => [key(cellsOf(row)[column]), row]);
  const sign = down ? 1 : -1;
  rows.sort(([a], [b]) => {
    if (a === '' || b === '') return (a === '') - (b === '');  // the unknown last
    return sign * (typeof a === 'number' && typeof b === 'number' ? a - b
      : String(a).localeCompare(String(b), undefined, {numeric: true}));
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}
const quoted = cell => /[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
const rowsOf = table => [...table.rows].map(cellsOf);
async function copy(button, text) {
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = make('textarea'); area.value = text;
    document.body.append(area); area.select(); done = document.execCommand('copy'); area.remove();
  }
  const before = button.textContent;
  button.textContent = done ? 'Copied' : 'The browser refused';
  setTimeout(() => { button.textContent = before; }, 1500);
}
function save(name, type, text) {
  const link = make('a', {download: name, href: URL.createObjectURL(new Blob([text], {type}))});
  document.body.append(link); link.click(); link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function button(label, act) {
  const made = make('button', {type: 'button'}, label);
  made.addEventListener('click', () => act(made));
  return made;
}
function large(details) {  // all pairs of a large map, from the data
  const body = $('tbody', details), columns = $('tr', details).cells.length;
  body.textContent = '';
  for (const source of details.dataset.source.split(' ')) {
    const errors = at(source + '/exact') ? '' : source + '/stderr', label = source.split('/').pop();
    const map = matrix(source + '/value', errors, source + '/names');
    map.value.forEach((row, i) => row.forEach((value, j) => {
      if (j < i) return;
      const line = make('tr'), error = map.errors ? map.errors[i][j] : null;
      for (const name of [label, map.names[i], map.names[j]]) line.append(make('td', {class: 'w'}, name));
      line.append(make('td', {}, value == null ? '' : String(Number(value.toPrecision(5)))));
      if (columns > 4) line.append(make('td', {}, error == null ? '' : String(Number(error.toPrecision(2)))));
      body.append(line);
    }));
  }
}
for (const details of all('details.data')) {
  const table = $('table', details), name = details.dataset.name, tools = make('div', {class: 'tools'});
  tools.append(button('Copy', made => copy(made, rowsOf(table).map(row => row.join('\t')).join('\n'))),
    button('CSV', () => save(name + '.csv', 'text/csv', rowsOf(table).map(row => row.map(quoted).join(',')).join('\n') + '\n')));
  if (details.dataset.source) tools.append(button('Show all pairs', made => { large(details); made.remove(); }));
  details.append(tools);
  all('thead th', table).forEach((header, column) => {
    const label = button(header.textContent, () => sort(table, column, header));
    header.textContent = '';
    header.append(label);
  });
}

// -- a figure as a file, in the colours now on the screen

const LOOK = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'font-family', 'font-size', 'font-weight', 'text-anchor'];
function drawing(svg) {
  svg = svg.cloneNode(true);
  for (const use of all('use', svg)) {  // what the page holds once
    const twin = $(use.getAttribute('href')).cloneNode(true);
    twin.removeAttribute('id');
    if (use.hasAttribute('transform')) twin.setAttribute('transform', use.getAttribute('transform').replace(')s', ') s'));
    use.replaceWith(twin);
  }
  for (const group of all('[filter]', svg)) {  // gray pictures take their colours from the page
    const filter = $(group.getAttribute('filter').slice(4, -1)).cloneNode(true);
    svg.insertBefore(filter, svg.firstChild);
  }
  document.body.append(svg);  // styles are those of the page
  const twin = svg.cloneNode(true), own = all('*', svg), copies = all('*', twin);
  own.forEach((element, i) => {
    const look = getComputedStyle(element);
    if (look.display === 'none') return copies[i].setAttribute('data-gone', '');
    if (!/^(g|rect|path|circle|text)$/.test(element.tagName)) return;
    for (const property of LOOK) {
      const value = look.getPropertyValue(property), above = getComputedStyle(element.parentNode).getPropertyValue(property);
      if (value && (element.tagName === 'g' || value !== above)) copies[i].setAttribute(property, value);
    }
  });
  svg.remove();
  all('[data-gone],.cursor', twin).forEach(element => element.remove());
  const ground = draw('rect', {width: '100%', height: '100%', fill: getComputedStyle(document.body).backgroundColor});
  twin.insertBefore(ground, twin.firstChild);
  for (const k of ['tabindex', 'role', 'class']) twin.removeAttribute(k);
  twin.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  return new XMLSerializer().serializeToString(twin);
}
for (const figure of all('figure[id]')) {
  const shown = () => all('svg', figure).find(svg => svg.getBoundingClientRect().width);
  const tools = $('.tools', figure) || figure.appendChild(make('div', {class: 'tools'}));
  tools.append(button('SVG', () => save(figure.id + '.svg', 'image/svg+xml', drawing(shown()))));
}
recall();
})();
