// Many workers in one process: an SSH server that listens on COUNT addresses and runs what it is told to run on each in
// that worker's own home directory.
//
//   node server.js HOSTKEY FIRST_ADDRESS PORT ROOT COUNT LOG
//
// Addresses count up in their last two bytes. Prints "ready" when all listen. Any public key is accepted. LOG gets a line
// of JSON for each command, when it begins and when it has ended: {at, worker, kind, done, code}; at is in ms on a clock
// that only grows. A worker whose home has a file "mute" never answers the command that makes the attempt.
'use strict';

const { spawn } = require('child_process');
const fs = require('fs');
const { Server } = require('ssh2');

const [, , keyPath, firstAddress, portText, root, countText, logPath] = process.argv;
const count = Number(countText);
const log = fs.openSync(logPath, 'a');

function now() {
  return Number(process.hrtime.bigint()) / 1e6;
}

function kindOf(command) {
  const kinds = [
    ['probe', 'ciranda-probe'],
    ['guard', 'cat > .ciranda/bin/'],
    ['place', 'tar -xf -'],
    ['go', / run \.ciranda\/\S+ /],
    ['follow', ' follow .ciranda/'],
    ['stop', ' stop .ciranda/'],
  ];
  const found = kinds.find(([, mark]) => (mark instanceof RegExp ? mark.test(command) : command.includes(mark)));
  return found ? found[0] : 'other';
}

function note(worker, kind, done, code) {
  fs.writeSync(log, `${JSON.stringify({ at: now(), worker, kind, done, code })}\n`);
}

function run(stream, command, worker, home) {
  const kind = kindOf(command);
  note(worker, kind, false);
  if (kind === 'place' && fs.existsSync(`${home}/mute`)) {
    return;
  }
  const child = spawn('/bin/sh', ['-c', command], {
    cwd: home,
    env: {
      PATH: process.env.PATH,
      HOME: home,
      USER: 'worker',
      SHELL: '/bin/sh',
      GANG_SHARED: `${root}/shared`,
      CIRANDA_GUARD_OPTIONS: `--devices ${home}/dev/accel --lock ${home}/lock --boot-id-file ${root}/boot_id`,
    },
  });
  child.on('error', (problem) => {
    stream.stderr.write(`${problem.message}\n`);
    stream.exit(126);
    stream.end();
  });
  stream.on('close', () => {
    child.stdout.destroy();
    child.stderr.destroy();
  });
  child.stdin.on('error', () => {});
  stream.pipe(child.stdin);
  child.stdout.pipe(stream, { end: false });
  child.stderr.pipe(stream.stderr, { end: false });
  child.on('close', (code, signal) => {
    note(worker, kind, true, code);
    if (signal) {
      stream.exit(signal.replace('SIG', ''), false, '');
    } else {
      stream.exit(code);
    }
    stream.end();
  });
}

function serve(client, worker, home) {
  client.on('error', () => {});
  client.on('authentication', (context) =>
    context.method === 'publickey' ? context.accept() : context.reject(['publickey']));
  client.on('session', (accept) => {
    const session = accept();
    session.on('env', (acceptEnv, reject) => reject && reject());
    session.on('exec', (acceptExec, reject, info) => run(acceptExec(), info.command, worker, home));
  });
}

const base = firstAddress.split('.').map(Number);
const hostKeys = [fs.readFileSync(keyPath)];
let listening = 0;
for (let worker = 0; worker < count; worker += 1) {
  const last = base[2] * 256 + base[3] + worker;
  const address = `${base[0]}.${base[1]}.${last >> 8}.${last & 255}`;
  const home = `${root}/home-${worker}`;
  const server = new Server({ hostKeys });
  server.on('connection', (client) => serve(client, worker, home));
  server.listen(Number(portText), address, 1024, () => {
    listening += 1;
    if (listening === count) {
      process.stdout.write('ready\n');
    }
  });
}
